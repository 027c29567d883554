"""The coordinator's status page in a real browser: it follows a run, fits a phone, and needs no mouse or eyes."""

import os
import shutil
from pathlib import Path

import pytest

from fedrecon._src.deploy.status_page import serve_status
from fedrecon._src.storage.run_folder import RunFolder
from test_deploy_status import round_record

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser installs it")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on this machine; install the distribution's", allow_module_level=True)
AXE, PICTURES = os.environ.get("FEDRECON_AXE", ""), os.environ.get("FEDRECON_SCREENSHOTS")
FACTS = {"Connected nodes": "north, south, west", "Refused requests": "2 unknown-key"}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def run(tmp_path):
    """A run of eight rounds and the address of its page."""
    folder = RunFolder(tmp_path / "run")
    for k in range(8):
        folder.record(round_record(k + 1, 0.9**k, epsilon=0.5 + k / 16))
        if k % 4 == 3:
            folder.record({"kind": "evaluation", "round": k + 1, "micro": {"loss": 0.95**k}})
    with serve_status(folder, 15, lambda: FACTS, ("127.0.0.1", 0)) as port:
        yield folder, f"http://127.0.0.1:{port}/"


def open_page(browser, address, width=1180, scheme="light", **options):
    page = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, **options).new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(address)
    return page


def test_the_page_follows_the_run_until_it_is_paused(browser, run):
    folder, address = run
    page = open_page(browser, address)
    page.get_by_text("8 of 15").first.wait_for()
    folder.record(round_record(9, 0.25))
    page.get_by_text("9 of 15").first.wait_for()
    assert page.title() == "Round 9 of 15 · fedrecon"
    assert page.get_by_role("img").get_attribute("aria-label") == "Loss from 1 in round 1 to 0.25"
    page.get_by_label("Update automatically").uncheck()
    folder.record(round_record(10, 0.125))
    page.wait_for_timeout(1500)
    assert page.get_by_text("10 of 15").count() == 0
    page.get_by_label("Update automatically").check()
    page.get_by_text("10 of 15").first.wait_for()
    assert page.problems == []  # nothing that the content security policy forbids
    page.context.close()


def test_the_page_says_that_the_coordinator_is_gone(browser, tmp_path):
    with serve_status(RunFolder(tmp_path / "run"), 15, dict, ("127.0.0.1", 0)) as port:
        page = open_page(browser, f"http://127.0.0.1:{port}/")
        page.get_by_text("No loss has been reported yet").wait_for()
    page.get_by_text("cannot be reached").wait_for()
    page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1180, "light"), (360, "dark")])
def test_the_page_fits_its_window_and_is_accessible(browser, run, width, scheme):
    page = open_page(browser, run[1], width, scheme, bypass_csp=True)
    page.get_by_role("img").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/status-{width}.png", full_page=True)
    if Path(AXE).is_file():
        page.add_script_tag(path=AXE)
        assert page.evaluate("axe.run().then((found) => found.violations.map((one) => one.id))") == []
    page.context.close()
