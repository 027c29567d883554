"""The page in a real browser: what it computes, keeps, forgets, sends, and how people with other devices find it.

Runs by `make test-browser`: Chromium of the system, driven by playwright. Screenshots go to docs/figures/device if
FEDRECON_SCREENSHOTS names that folder.
"""

import dataclasses
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from device_models import clicks_model, counts_model, default_model, trained
from fedrecon._src.app.cli.demo import SETTINGS
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.device.export import packed
from fedrecon._src.device.model_bundle import bundle_model
from fedrecon._src.device.web_page import serve
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.recommend.serving import Recommender
from fedrecon._src.recommend.tasks import RATINGS
from fedrecon._src.recommend.tasks.ratings import load_ratings
from fedrecon_device import Bundle
from fedrecon_device.tensors import GLOBAL, as_float32

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser installs it")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on this machine; install the distribution's", allow_module_level=True)


def named(variable):
    """Return the path that an environment variable names; None if it names none, or nothing is there."""
    path = os.environ.get(variable)
    return path if path and Path(path).exists() else None


AXE = named("FEDRECON_AXE")  # axe.min.js of the npm package axe-core
ORT_WEB = named("FEDRECON_ONNXRUNTIME_WEB")  # the folder dist of the npm package onnxruntime-web
PICTURES = os.environ.get("FEDRECON_SCREENSHOTS")
RATED = {"Matrix, The": 5, "Toy Story": 4, "Pulp Fiction": 5, "Jurassic Park": 2, "Fargo": 4}


@pytest.fixture(scope="module")
def saved():
    """A model of real films: that of an earlier demo if FEDRECON_RUN names it, or one with made-up numbers."""
    if os.environ.get("FEDRECON_RUN"):
        return open_model(os.environ["FEDRECON_RUN"])
    return of_films(default_model(low=0.5, high=5.0))


def of_films(model):
    """Return a model of the real films with the settings of another, and made-up numbers."""
    items = RATINGS.legend(SETTINGS, load_ratings(SETTINGS.data))
    return dataclasses.replace(model, legend=items, params=trained(model.task.build_model(model.config, items)))


@pytest.fixture(scope="module")
def address(saved, tmp_path_factory):
    folder = bundle_model(saved, tmp_path_factory.mktemp("bundle") / "films", most=100, quantise="int8", onnx=False)
    for _, found in served(folder):
        yield found


@pytest.fixture(scope="module", params=["output_bias", "oov_embedding"])
def writing(request, tmp_path_factory):
    """A bundle of a small model of text, and where its page is."""
    from device_models import text_bundle

    if ORT_WEB is None:
        pytest.skip(
            "there is no onnxruntime-web where FEDRECON_ONNXRUNTIME_WEB says; make test-browser installs it with npm"
        )
    folder = tmp_path_factory.mktemp("bundle") / "text"
    text_bundle(folder, vendor=Path(ORT_WEB), local=request.param)
    yield from served(folder)


def served(folder):
    server = serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://localhost:{server.server_address[1]}/web/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def context(browser):
    found = browser.new_context(viewport={"width": 1180, "height": 900}, color_scheme="light")
    yield found
    found.close()


def opened(context, address):
    """Open the page and wait until it is ready, offline too; `wait_for_function` is not allowed by its policy."""
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.problems = []
    page.on("pageerror", lambda problem: page.problems.append(str(problem)))
    page.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)
    page.goto(address)
    ready(page)
    return page


def ready(page):
    until(page, "document.documentElement.dataset.ready")
    state = page.evaluate("document.documentElement.dataset.ready")
    assert state == "yes", page.inner_text("#loading")


def rate(page, title, stars):
    page.fill("#search", title)
    row = page.locator("#results li", has=page.get_by_text(title, exact=True))
    row.locator("label").nth(stars - 1).click()


def rate_all(page):
    for title, stars in RATED.items():
        rate(page, title, stars)
    page.fill("#search", "")


def picture(page, name, **options):
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement?.closest('dialog') ?? document.activeElement?.blur()")
        page.screenshot(path=f"{PICTURES}/{name}.png", **options)
        with Image.open(f"{PICTURES}/{name}.png") as found:  # fewer colours are a third of the bytes
            found.quantize(64).save(f"{PICTURES}/{name}.png", optimize=True)


def test_five_ratings_give_the_parameters_scores_and_order_that_python_gives(saved, context, address):
    page = opened(context, address)
    rate_all(page)
    picture(page, "films")
    found = page.evaluate("({...fedrecon, scores: Array.from(fedrecon.scores)})")

    leaves, structure = flatten(saved.params)
    params = unflatten(structure, as_float32(packed(leaves, "int8"), GLOBAL))
    served = Recommender(dataclasses.replace(saved, params=params))
    titles, ids = saved.legend.titles.tolist(), saved.legend.ids.tolist()
    person = {ids[titles.index(title)]: stars for title, stars in RATED.items()}
    mine = served.reconstruct(person)
    order = ("user_bias", "user_embedding", "user_traits")
    assert found["local"] == pytest.approx(np.concatenate([np.ravel(mine[name]) for name in order]), abs=1e-5)
    ((_, scores, _),) = served._every_score(served._clients(person)[0])
    assert found["scores"] == pytest.approx(scores[0].tolist(), abs=1e-5)
    best = served.recommend(person, 10)
    assert [ids[k] for k in found["best"]] == [one.item for one in best]
    assert page.locator("#best .title").all_inner_texts() == [one.title for one in best]
    told = [float(text) for text in page.locator("#best .score").all_inner_texts()]
    assert told == pytest.approx([one.rating for one in best], abs=0.0501)
    assert all(0.5 <= rating <= 5 for rating in told)
    assert "close to " in page.inner_text("#best li")
    assert page.problems == []


def test_items_that_a_new_model_does_not_know_are_kept_and_left_out(context, address):
    page = opened(context, address)
    rate(page, "Toy Story", 5)
    before = page.evaluate("Array.from(fedrecon.scores)")
    page.evaluate(
        """() => {
          const [key] = Object.keys(localStorage);
          const kept = JSON.parse(localStorage.getItem(key));
          kept.examples.push([123456789, 1], ["no such film", 5]);
          localStorage.setItem(key, JSON.stringify(kept));
        }"""
    )
    page.reload()
    ready(page)
    assert page.locator("#rated li").count() == 1
    assert page.evaluate("Array.from(fedrecon.scores)") == before
    rate(page, "Alien", 4)
    assert len(page.evaluate("JSON.parse(Object.values(localStorage)[0]).examples")) == 4


def test_ratings_change_recommendations_survive_a_reload_and_are_gone_when_forgotten(context, address):
    page = opened(context, address)
    assert page.locator("#best li").count() == 0
    rate(page, "Toy Story", 5)
    before = page.locator("#best .title").all_inner_texts()
    rate(page, "Toy Story", 1)
    after = page.locator("#best .title").all_inner_texts()
    assert before != after
    assert page.inner_text("#kept-what").startswith("1 rating,")
    page.reload()
    ready(page)
    assert page.locator("#best .title").all_inner_texts() == after
    page.click("#forget")
    picture(page, "forget")
    page.click("#really .danger")
    until(page, "document.getElementById('kept-what').textContent === 'nothing'")
    assert page.locator("#best li").count() == 0
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    ready(page)
    assert page.inner_text("#kept-what") == "nothing"


def test_nothing_is_requested_after_loading_and_it_works_without_a_network(context, address):
    page = opened(context, address)
    requests = []
    context.on("request", lambda request: requests.append(request.url))
    rate_all(page)
    page.click("#more")
    assert requests == []
    refused = page.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    context.set_offline(True)
    page.reload()
    ready(page)
    assert page.locator("#rated li").count() == len(RATED)
    rate(page, "Alien", 5)
    assert page.locator("#rated li").count() == len(RATED) + 1
    assert [url for url in requests if not url.startswith(address.removesuffix("web/"))] == []


def test_keyboard_alone_is_enough_to_search_rate_and_remove(context, address):
    page = opened(context, address)
    page.focus("#search")
    page.keyboard.type("casablanca")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator("#rated li").count() == 1
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#rated input:checked").get_attribute("value") == "3"
    assert "Casablanca" in page.inner_text("#said")
    page.locator("#rated input:checked").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # the focus is where it was, though the list was made anew
    assert page.locator("#rated input:checked").get_attribute("value") == "5"
    assert page.locator("#results input:checked").get_attribute("value") == "5"
    page.click("#more")
    assert page.evaluate("document.activeElement === document.getElementById('best').children[10]")
    page.locator("#rated .remove").focus()
    page.keyboard.press("Enter")
    assert page.locator("#rated li").count() == 0
    assert page.locator("#results input:checked").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_in_its_width(browser, address, scheme):
    phone = browser.new_context(
        viewport={"width": 390, "height": 844},
        device_scale_factor=1,
        is_mobile=True,
        has_touch=True,
        color_scheme=scheme,
    )
    page = opened(phone, address)
    rate_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if scheme == "dark":
        picture(page, "phone-dark")
    page.evaluate("document.getElementById('best-heading').scrollIntoView()")
    if scheme == "light":
        picture(page, "phone-light-best")
    box = page.locator("#results label").first.bounding_box()
    assert box["height"] >= 24
    assert box["width"] >= 24  # the least size of a target, WCAG 2.2
    phone.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, address, scheme):
    if AXE is None:
        pytest.skip("FEDRECON_AXE names no axe-core; make test-browser installs it with npm")
    context = browser.new_context(viewport={"width": 1180, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = opened(context, address)
    rate_all(page)
    if scheme == "dark":
        picture(page, "films-dark")
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run().then((found) => found.violations)")
    assert [(one["id"], one["impact"], one["nodes"][0]["html"]) for one in found] == []
    context.close()


def test_words_are_suggested_as_python_suggests_them_with_the_persons_own(context, writing, tmp_path):
    from fedrecon_device import Personal

    folder, address = writing
    text = "The zebra-fish ate my sandwich. I told you so!\nWe met Kwame at the station"
    page = opened(context, address)
    requests = []
    context.on("request", lambda request: requests.append(request.url))
    page.fill("#text", text)  # as pasted: learned at once
    until(page, "document.getElementById('learned').textContent.startsWith('Learned from 3 sentences')")
    page.fill("#text", "")
    page.type("#text", "we met ")
    until(page, "fedrecon.after === 'we met' && fedrecon.words.length === 5")
    picture(page, "writing")
    found = page.evaluate("fedrecon")

    person = Personal(folder, tmp_path / "me.json")
    person.add(text=text)
    for path, leaf in person.refresh().items():
        assert found["local"][path] == pytest.approx(leaf.reshape(-1).tolist(), abs=1e-5)
    expected = person.complete("we met", 5)
    assert [one["word"] for one in found["words"]] == [one.word for one in expected]
    assert [one["personal"] for one in found["words"]] == [one.personal for one in expected]
    assert [one["probability"] for one in found["words"]] == pytest.approx(
        [one.probability for one in expected], abs=1e-5
    )
    assert any(one.personal for one in expected)
    assert requests == []
    context.set_offline(True)
    page.reload()
    ready(page)
    assert page.inner_text("#kept-what").startswith("3 sentences")
    assert page.problems == []


def test_a_persons_invented_words_are_suggested_after_two_uses(context, writing):
    """Three invented words, typed twice each in whole sentences; nothing is clicked."""
    page = opened(context, writing[1])
    sentences = {
        "i told my flumphox": "i told my",
        "we ate a krazzle with you": "we ate a",
        "so it is zibbit !": "so it is",
    }
    for repeat in (1, 2):
        for count, sentence in enumerate(sentences, 1):
            page.type("#text", f"{sentence}\n")
            until(
                page,
                f"document.getElementById('learned').textContent.includes('from {3 * repeat - 3 + count} sentence')",
            )
    for sentence, beginning in sentences.items():
        invented = next(word for word in sentence.split() if word in ("flumphox", "krazzle", "zibbit"))
        page.type("#text", f"{beginning} ")
        until(page, f"[...document.querySelectorAll('#suggestions .own')].some((e) => e.textContent === '{invented}')")
        page.type("#text", invented[:2])
        until(page, f"fedrecon.after === '{beginning}' && fedrecon.letters === '{invented[:2]}'")
        assert page.inner_text("#suggestions button >> nth=0") == invented
        picture(page, f"own-{invented}")
        page.click("#suggestions button")
        assert page.input_value("#text").endswith(f"{beginning} {invented} ")
        page.type("#text", "\n")
    assert page.problems == []


def test_counts_are_entered_as_numbers_and_shown_as_counts(context, tmp_path):
    saved = counts_model()
    bundle_model(saved, tmp_path / "counts", most=10, onnx=False)
    for _, address in served(tmp_path / "counts"):
        page = opened(context, address)
        page.fill("#search", "artist 7")
        page.locator("#results input").first.fill("1200")
        page.keyboard.press("Enter")
        page.fill("#search", "artist 30")
        page.locator("#results input").first.fill("-3")
        page.keyboard.press("Enter")
        assert page.locator("#rated li").count() == 1  # no count is below 0
        page.locator("#results input").first.fill("2")
        page.keyboard.press("Enter")
        picture(page, "counts")
        best = Recommender(saved).recommend({7: 1200.0, 30: 2.0}, 10)
        assert page.locator("#best .title").all_inner_texts() == [one.title for one in best]
        told = [float(text.replace(",", "")) for text in page.locator("#best .score").all_inner_texts()]
        assert told == pytest.approx([one.rating for one in best], abs=0.501)
        assert page.problems == []


def test_what_one_has_is_chosen_and_ranks_the_rest_as_in_python(context, tmp_path):
    saved = open_model(os.environ["FEDRECON_CLICKS_RUN"]) if os.environ.get("FEDRECON_CLICKS_RUN") else clicks_model()
    bundle_model(saved, tmp_path / "clicks", most=10, quantise="int8", onnx=False)
    titles, ids = saved.legend.titles.tolist(), saved.legend.ids.tolist()
    first, second, third = [title for title in [*RATED, "record 3", "record 15", "record 149"] if title in titles][:3]
    mine = {ids[titles.index(title)]: title for title in (first, second, third)}
    for _, address in served(tmp_path / "clicks"):
        page = opened(context, address)
        for title in mine.values():
            page.fill("#search", title)
            page.get_by_label(f"I have {title}", exact=True).check()
        page.fill("#search", "")
        picture(page, "clicks")
        params = as_float32(packed(saved.params, "int8", ("gram", "*popularity*")), GLOBAL)
        served_by_python = Recommender(dataclasses.replace(saved, params=params))
        person = dict.fromkeys(mine, 1)
        found = page.evaluate("({...fedrecon, scores: Array.from(fedrecon.scores)})")
        local = served_by_python.reconstruct(person)
        numbers = [*local["user_embedding"].tolist(), *local["popularity_weight"].reshape(-1).tolist()]
        assert found["local"] == pytest.approx(numbers, abs=1e-5)
        assert found["scores"] == pytest.approx(served_by_python.predict(person).tolist(), abs=1e-5)
        best = served_by_python.recommend(person, 10)
        assert page.locator("#best .title").all_inner_texts() == [one.title for one in best]
        assert page.inner_text("#kept-what").startswith("3 titles,")
        page.get_by_role("button", name=f"Remove {first}", exact=True).click()
        assert page.locator("#rated li").count() == 2
        page.fill("#search", second)
        page.get_by_label(f"I have {second}", exact=True).uncheck()
        assert page.locator("#rated .title").all_inner_texts() == [third]
        assert page.problems == []


def test_what_cannot_be_read_is_no_obstacle_and_what_cannot_be_stored_is_told(context, address):
    page = opened(context, address)
    for damaged in ("{", '{"version": 1, "examples": 7}', '{"version": 1, "examples": [null, [1], [1, "x"]]}'):
        page.evaluate("(text) => localStorage.setItem('fedrecon:/web/', text)", damaged)
        page.reload()
        ready(page)
        assert page.inner_text("#kept-what").startswith("0 ratings,")
        assert page.is_enabled("#forget")
    full = "() => { throw new DOMException('full', 'QuotaExceededError'); }"
    page.evaluate(f"() => {{ Storage.prototype.setItem = {full}; }}")
    assert page.is_hidden("#full")
    rate(page, "Toy Story", 5)
    assert page.locator("#best li").count() == 10
    assert "lost when you" in page.inner_text("#full")
    assert page.inner_text("#kept-where") == "On this page, until you close it"
    page.click("#forget")
    page.click("#really .danger")
    until(page, "document.getElementById('kept-what').textContent === 'nothing'")
    assert page.is_hidden("#full")
    assert page.problems == []


def test_a_newer_model_at_the_same_address_is_offered_and_keeps_what_was_entered(context, tmp_path):
    older, newer = default_model(), default_model()
    newer = dataclasses.replace(newer, params=trained(RATINGS.build_model(newer.config, newer.legend), seed=1))
    digests = []
    for name, model in (("older", older), ("newer", newer)):
        bundle_model(model, tmp_path / name, most=10, onnx=False)
        digests.append(Bundle(tmp_path / name).model_digest[:12])
    os.rename(tmp_path / "older", tmp_path / "served")
    for _, address in served(tmp_path / "served"):
        page = opened(context, address)
        assert page.inner_text("#model") == digests[0]
        page.fill("#search", "film 3 [1007]")
        page.locator("#results input").first.fill("4")
        page.keyboard.press("Enter")
        os.rename(tmp_path / "served", tmp_path / "older")
        os.rename(tmp_path / "newer", tmp_path / "served")
        page.reload()
        until(page, "!document.getElementById('newer').hidden")
        page.click("#reload")
        until(page, f"document.getElementById('model').textContent === '{digests[1]}'")
        ready(page)
        assert page.locator("#rated .title").all_inner_texts() == ["film 3 [1007]"]
        assert page.problems == []


def until(page, condition, seconds=120):
    end = time.monotonic() + seconds
    while not holds(page, condition):
        assert time.monotonic() < end, f"never: {condition}"
        page.wait_for_timeout(50)


def holds(page, condition):
    """Return whether something is true of the page; not of one that is just being replaced."""
    try:
        return page.evaluate(condition)
    except playwright.Error as problem:
        if "navigation" not in str(problem):
            raise
        return False
