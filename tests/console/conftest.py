import os
import shutil
import signal
import threading
from contextlib import contextmanager

import pytest

from tests.console.filled import Filled
from tests.gateway.house import UNSURE, houses, votes
from tests.gateway.people import PeopleHouse

LONGEST = 600.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def house(tmp_path):
    """Start gateways, each in a folder of its own; all are stopped in the end."""
    with houses(tmp_path) as start:
        yield start


@pytest.fixture
def crew(house):
    """A gateway with a team of two and a lead; keys by name."""

    def start(**options):
        gate = house(PeopleHouse, primary=votes(*UNSURE), **{"members": ("ann", "bob"), "leads": ("lea",), **options})
        gate.secrets = {name: gate.key("review", name)[0] for name in ("ann", "bob", "cid")}
        gate.secrets["lea"] = gate.key("admin", "lea")[0]
        gate.headers = gate.keyed("call")
        return gate

    return start


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A gateway with traffic, audits, an alarm and hostile text in every field."""
    with Filled(tmp_path_factory.mktemp("filled")) as started:
        yield started


def chromium():
    """Return the path of a browser, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser():
    """Gives a real browser, one for each module: while it is open, no other test of this process can run an event loop."""
    path = chromium()
    if path is None:
        message = "no Chromium here; apt-get install chromium, or set CHROMIUM"
        if os.environ.get("BROWSER") == "required":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = []

        def alive():
            if not started or not started[-1].is_connected():
                arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
                started.append(driver.chromium.launch(executable_path=path, args=arguments))
            return started[-1]

        yield alive
        with ended_after(LONGEST, alive()):
            started[-1].close()


@contextmanager
def ended_after(seconds, browser):
    """End a browser's process if it takes too long."""
    session = browser.new_browser_cdp_session()
    listed = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    process = next(one["id"] for one in listed if one["type"] == "browser")
    watchdog = threading.Timer(seconds, os.kill, (process, signal.SIGKILL))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()


@pytest.fixture
def open_page(browser, tmp_path, request):
    """Open pages in contexts of their own; an error in any console fails the test, and leaves a picture.

    Playwright waits for scripts and for pages that close without a limit, so a browser that hangs is ended.
    """
    contexts, trouble, pages, opened = [], [], [], browser()

    def start(url=None, *, width=1280, height=900, dark=False, **options):
        context = opened.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
            reduced_motion="reduce", **options,
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type == "error" and trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        pages.append(page)
        page.trouble = trouble
        if url is not None:
            page.goto(url)
        return page

    with ended_after(LONGEST, opened):
        yield start
        if request.node.stash.get(FAILED, False):
            for number, page in enumerate(pages):
                if not page.is_closed():
                    page.screenshot(path=tmp_path / f"page-{number}.png")
        for context in contexts:
            context.close()
    assert opened.is_connected(), f"the browser hung, and was ended after {LONGEST} s"
    assert not trouble, trouble


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        item.stash[FAILED] = outcome.get_result().failed
