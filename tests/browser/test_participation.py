"""People who take part in training from their browsers, each in a context of its own, with real servers."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import fedrecon as fr
from deployed_devices import (
    LEAST,
    ROUNDS,
    RUNTIME,
    SECRET,
    SEED,
    assert_equal,
    clients_of,
    coordinating,
    make_bundle,
    page_server,
    ratings_of,
    run_node,
    train_on_silos,
)
from fedrecon_device.files import manifest_bytes

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser installs it")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None or not RUNTIME.is_dir():
    pytest.skip("needs Chromium and the packages of make test-web", allow_module_level=True)
AXE, PICTURES = os.environ.get("FEDRECON_AXE", ""), os.environ.get("FEDRECON_SCREENSHOTS")
FIRST_ID = 1000  # of the films
ENTRY = "fedrecon:/web/"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("train") / "bundle")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def person(browser):
    """Open the page as another person: `person(address, examples, **options)`."""
    contexts = []

    def open_page(address, columns=None, width=1180, before="", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        if columns is not None:
            pairs = zip(columns["item"].tolist(), columns["rating"].tolist(), strict=True)
            entry = json.dumps({"version": 1, "examples": [[FIRST_ID + item, rating] for item, rating in pairs]})
            context.add_init_script(f"localStorage.getItem({ENTRY!r}) ?? localStorage.setItem({ENTRY!r}, {entry!r})")
        if before:
            context.add_init_script(before)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.goto(address)
        until(page, "document.documentElement.dataset.ready === 'yes'")
        return page

    yield open_page
    for context in contexts:
        context.close()


def until(page, condition, seconds=180):
    """Wait; `wait_for_function` is not allowed by the page's policy."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never: {condition}; {page.problems}; {page.inner_text('#sharing')}"
        page.wait_for_timeout(50)


def received(count):
    """Return the condition that the page lists so many reports, and that the coordinator has every one of them."""
    lines = "[...document.querySelectorAll('#sent li')]"
    return f"{lines}.length === {count} && {lines}.every((li) => li.textContent.includes('received'))"


def kept(page):
    return json.loads(page.evaluate(f"localStorage.getItem({ENTRY!r})"))


@pytest.mark.parametrize("sums", ["ring", "floats"])
def test_simulation_silos_node_and_browsers_train_one_model(sums, person, tmp_path):
    """Integers of a ring add up exactly, so parameters are equal to the bit; sums of floats agree to 1e-5."""
    aggregate = None if sums == "ring" else fr.aggregators.mean(clip_norm=5.0)
    bundle, start = make_bundle(tmp_path / "bundle", aggregate, fresh=True)
    examples = [ratings_of(k) for k in range(LEAST)]
    with (
        coordinating(bundle, start, tmp_path / "chromium") as (server, results),
        page_server().PageServer(bundle, server, SECRET) as site,
    ):
        pages = [person(site.address, columns) for columns in examples]
        for page in pages:
            assert not page.is_checked("#share")  # off until somebody turns it on
            page.check("#share")
        for page in pages:
            until(page, received(ROUNDS))
        assert [page.problems for page in pages] == [[], [], []]  # before the coordinator ends
        people = {kept(page)["participation"]["name"]: columns for page, columns in zip(pages, examples, strict=True)}
    in_browsers = results[0].params
    assert pages[0].inner_text("#sent li:first-child").count("·") == 4

    with coordinating(bundle, start, tmp_path / "node") as (server, results):
        process = run_node(bundle, server, people, tmp_path)
    assert json.loads(process.stdout) == {"devices": LEAST, "reports": LEAST * ROUNDS}, process.stderr
    on_silos = train_on_silos(start.algorithm, people, tmp_path / "silos")
    simulated = fr.train(start.algorithm, clients_of(people), rounds=ROUNDS, clients_per_round=LEAST, seed=SEED).params
    before = jax.tree.leaves(start.params)
    assert max(np.abs(leaf - old).max() for leaf, old in zip(jax.tree.leaves(simulated), before, strict=True)) > 1e-3
    for params in (on_silos, results[0].params, in_browsers):
        assert_equal(params, simulated, 0 if sums == "ring" else 1e-5)


def test_a_person_is_one_device_in_all_tabs_until_they_leave(bundled, person, tmp_path):
    bundle, start = bundled
    with (
        coordinating(bundle, start, tmp_path) as (server, results),
        page_server().PageServer(bundle, server, SECRET) as site,
    ):
        first, *others = [person(site.address, ratings_of(k)) for k in range(LEAST)]
        sent = []  # the method, the path and the device of every request to the coordinator

        def note(request):
            if "/v1/" in request.url:
                device = request.headers["authorization"].split(".")[1]
                sent.append((request.method, request.url.partition("/v1/")[2].partition("/reports/")[0], device))

        first.context.on("request", note)
        second = first.context.new_page()
        second.problems = []
        second.goto(site.address)
        until(second, "document.documentElement.dataset.ready === 'yes'")
        first.check("#share")
        until(second, "document.getElementById('share').checked")  # it is one person's switch
        until(first, received(1))  # a report that is on its way would be lost with its tab
        first.reload()  # ends its worker, so that the other tab goes on
        for page in others:  # only now, so that the first round has not ended meanwhile
            page.check("#share")
        for page in (first, second, *others):
            until(page, received(ROUNDS))
        deadline = time.monotonic() + 180
        while not results and time.monotonic() < deadline:
            first.wait_for_timeout(100)
        assert sorted(path for method, path, _ in sent if method == "PUT") == ["rounds/0", "rounds/1"]
        devices = {device for _, _, device in sent}
        assert devices == {f"visitor-{kept(first)['participation']['device']}"}
        second.uncheck("#share")
        until(first, "!document.getElementById('share').checked")
        second.check("#share")
        until(first, "document.getElementById('share').checked")  # what another tab stores takes a while to arrive
        assert kept(first)["participation"]["device"] not in "".join(devices)
    assert [record["answered"] for record in results[0].history] == [LEAST] * ROUNDS


def test_the_switch_says_what_is_sent_and_off_keeps_nothing_but_the_ratings(bundled, person, tmp_path):
    bundle, start = bundled
    with (
        coordinating(bundle, start, tmp_path, reports=4) as (server, results),
        page_server().PageServer(bundle, server, SECRET) as site,
    ):
        page = person(site.address, ratings_of(2))
        requests = []
        page.context.on("request", lambda request: requests.append(request.url))
        what = page.inner_text("#share-what")
        assert what.count(". ") == 1
        for words in (
            "at most 50 times a day",
            "localhost",
            "9\u00a0kB",
            "never what you entered",
            "at least 3 devices",
        ):
            assert words in what
        assert "this page sends nothing" in page.inner_text("#kept")
        assert requests == []
        page.check("#share")
        until(page, received(1))
        assert "this page sends nothing" not in page.inner_text("#kept")
        page.uncheck("#share")
        assert page.locator("#sent li").count() == 0
        assert set(kept(page)) == {"version", "examples"}
        assert len(kept(page)["examples"]) == 10
        page.wait_for_timeout(500)  # what was asked for before is noted by then
        requests.clear()
        page.wait_for_timeout(1500)
        assert requests == []
        page.check("#share")
        page.click("#forget")
        page.click("#really .danger")
        until(page, "document.getElementById('kept-what').textContent === 'nothing'")
        until(page, "!document.getElementById('share').checked")
        assert page.evaluate("localStorage.length") == 0
        others = [person(site.address, ratings_of(k)) for k in (3, 4, 5, 6)]
        for other in others:
            other.check("#share")
        deadline = time.monotonic() + 180
        while not results and time.monotonic() < deadline:
            others[0].wait_for_timeout(100)
    assert [record["answered"] for record in results[0].history] == [4, 4]


@pytest.mark.parametrize("connection", ["{saveData: true}", "{type: 'cellular'}"])
def test_nothing_is_sent_on_a_metered_connection(bundled, person, connection):
    with page_server().PageServer(bundled[0], "http://127.0.0.1:9", SECRET) as site:
        metered = f"Object.defineProperty(navigator, 'connection', {{value: {connection}}})"
        page = person(site.address, ratings_of(1), before=metered)
        requests = []
        page.context.on("request", lambda request: requests.append(request.url))
        page.check("#share")
        until(page, "document.getElementById('share-state').textContent.includes('not metered')")
        page.wait_for_timeout(300)
        assert [url for url in requests if "background" not in url and "/web/" not in url] == []


def test_a_coordinator_that_is_gone_is_no_obstacle_to_using_the_page(bundled, person):
    with page_server().PageServer(bundled[0], "http://127.0.0.1:9", SECRET) as site:
        page = person(site.address, ratings_of(1))
        page.check("#share")
        until(page, "document.getElementById('share-state').textContent.includes('Trying again later')")
        assert page.locator("#best li").count() == 10
        assert kept(page)["participation"]["reports"] == []


def change_plan(bundle, **limits):
    """Replace the terms of a bundle, as a site does that publishes another one."""
    plan, manifest = (json.loads((bundle / name).read_text()) for name in ("plan.json", "manifest.json"))
    data = json.dumps(plan | {"limits": plan["limits"] | limits}).encode()
    manifest["files"]["plan.json"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / "plan.json").write_bytes(data)
    (bundle / "manifest.json").write_bytes(manifest_bytes(manifest))


def test_other_terms_need_another_consent(bundled, person, tmp_path):
    bundle = Path(shutil.copytree(bundled[0], tmp_path / "bundle"))
    with page_server().PageServer(bundle, "http://127.0.0.1:9", SECRET) as site:
        uncached = "delete Navigator.prototype.serviceWorker"
        page = person(site.address, ratings_of(1), before=uncached)
        page.check("#share")
        until(page, "document.getElementById('share-state').textContent.includes('Trying again later')")
        page.reload()
        # Until the requests of this load are over: they must not be counted below.
        until(page, "document.getElementById('share-state').textContent.includes('Trying again later')")
        assert page.is_checked("#share")  # the same terms

        change_plan(bundle, reports_per_day=900)
        requests = []
        page.context.on("request", lambda request: requests.append(request.url))
        page.reload()
        until(page, "document.documentElement.dataset.ready === 'yes'")
        page.wait_for_timeout(1500)
        assert not page.is_checked("#share")
        assert "terms have changed" in page.inner_text("#share-what")
        assert "900 times a day" in page.inner_text("#share-what")
        assert set(kept(page)) == {"version", "examples"}
        assert [url for url in requests if "/v1/" in url or "participation.json" in url] == []

        change_plan(bundle, reports_per_day=1000)  # while the page shows 900
        page.check("#share")
        until(page, "document.getElementById('share-state').textContent.includes('the terms have changed; reload')")
        assert [url for url in requests if "/v1/" in url] == []


@pytest.mark.parametrize(("width", "scheme"), [(1180, "light"), (360, "dark")])
def test_the_switch_is_accessible_and_fits_a_phone(bundled, person, width, scheme):
    sent = {"time": 1_790_000_000, "run": "r", "round": 7, "bytes": 979_257, "status": "sent"}
    sent["protected"] = "masked for two servers: they learn sums of 3 or more"
    record = json.dumps(
        {
            "name": "n",
            "reports": [sent, sent | {"round": 8, "status": "too late"}],
            "plan": None,
            "state": {},
            "agreed": hashlib.sha256((bundled[0] / "plan.json").read_bytes()).hexdigest(),
        }
    )
    with page_server().PageServer(bundled[0], "http://127.0.0.1:9", SECRET) as site:
        page = person(site.address, ratings_of(1), width, color_scheme=scheme, bypass_csp=True)
        page.evaluate(
            """([key, record]) => {
              const entry = {...JSON.parse(localStorage.getItem(key)), participation: JSON.parse(record)};
              localStorage.setItem(key, JSON.stringify(entry));
            }""",
            [ENTRY, record],
        )
        page.reload()
        until(page, "document.querySelectorAll('#sent li').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = page.locator("#share").bounding_box()
        assert min(box["width"], box["height"]) >= 24  # the least size of a target, WCAG 2.2
        if PICTURES:
            page.locator("#sharing").screenshot(path=f"{PICTURES}/sharing-{width}.png")
        page.focus("#share")
        page.keyboard.press("Space")
        assert page.locator("#sent li").count() == 0
        page.keyboard.press("Space")
        if Path(AXE).is_file():
            page.add_script_tag(path=AXE)
            found = page.evaluate("axe.run().then((found) => found.violations)")
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_training_leaves_the_page_responsive(bundled, person, tmp_path):
    """While the worker loads the runtime and trains, the page does neither, and no frame of it takes long."""
    bundle, start = bundled
    with (
        coordinating(bundle, start, tmp_path) as (server, _),
        page_server().PageServer(bundle, server, SECRET) as site,
    ):
        pages = [person(site.address, ratings_of(k)) for k in range(LEAST)]
        began = time.monotonic()
        for page in pages:
            page.evaluate(
                """() => {
                  window.longest = 0;
                  new PerformanceObserver((list) => {
                    window.longest = Math.max(window.longest, ...list.getEntries().map((entry) => entry.duration));
                  }).observe({type: "longtask"});
                }"""
            )
            page.check("#share")
        for page in pages:
            until(page, received(ROUNDS))
        loaded = pages[0].evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert any("background" in name for name in loaded) or pages[0].workers
        assert not any(".wasm" in name or "update.onnx" in name for name in loaded)
        # A frame waits for a core as well, so it may take longer on a busy machine, where everything does.
        took = 1000 * (time.monotonic() - began)
        assert min(page.evaluate("window.longest") for page in pages) < max(500, took / 4)  # ms
