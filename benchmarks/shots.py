"""Take the pictures of docs/console.md: `python -m benchmarks.shots [--out docs]`; needs Chromium and the extra dev."""

import argparse
import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from conformal_arbitrage.cli.demo import fill_console, run_demo
from conformal_arbitrage.gateway import running
from conformal_arbitrage.live.config import read_config

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES = {"wide": (1160, False), "phone": (390, True)}
"""Width, and whether it is dark."""


@contextmanager
def serving(path: Path) -> Generator[str]:
    """Serve a configuration on a free port, in a thread of its own; yield the address."""
    config = read_config(path)
    config = structs.replace(config, gateway=structs.replace(config.gateway, port=0))
    loop, ready = asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with running(config) as (url, task):
            addresses.append(url)
            ready.set()
            await asyncio.wait([stopping, task], return_when=asyncio.FIRST_COMPLETED)

    stopping: asyncio.Future[None] = loop.create_future()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stopping.set_result, None)
        thread.join()
        loop.close()


def main() -> None:
    """Fill a demo, open its pages, and save what they look like."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs", help="folder for the pictures")
    out = Path(parser.parse_args().out)
    with tempfile.TemporaryDirectory() as folder:
        run_demo(folder)
        with serving(fill_console(Path(folder))) as url:
            shoot(url, out)


def shoot(url: str, out: Path) -> None:
    """Save pictures of some pages."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        for size, (width, dark) in SIZES.items():
            scheme = "dark" if dark else "light"
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page = context.new_page()
            page.goto(f"{url}/console")
            save(page, out / f"console-overview-{size}.png", whole=not dark)
            page.goto(f"{url}/console/policies/science")
            if not dark:
                save(page, out / f"console-budget-{size}.png", part="#budget")
            if not dark:
                page.goto(f"{url}{decision(page, url)}")
                save(page, out / f"console-decision-{size}.png")
            page.goto(f"{url}/console/review")
            page.keyboard.press("Enter")
            page.wait_for_selector("#item")
            page.keyboard.press("1")
            if not dark:
                save(page, out / f"console-review-{size}.png")
            page.keyboard.press("p")
            page.wait_for_selector("#begin")
            context.close()
        width, _ = SIZES["wide"]
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light")
        grade(context.new_page(), url, out / "console-grade-wide.png")
        context.close()
        browser.close()


def decision(page: "Page", url: str) -> str:
    """Return the path of a decision with candidates and other options, or else of the newest that the Guardian made."""
    page.goto(f"{url}/console/decisions?policy=science&who=guardian")
    paths = [link.get_attribute("href") or "" for link in page.locator("td a").all()]
    for path in paths:
        page.goto(f"{url}{path}")
        if page.locator("svg.wide rect.other").count() > 1:
            return path
    return paths[0]


def grade(page: "Page", url: str, path: Path) -> None:
    """Answer questions until there are answers to grade, and save what that looks like."""
    page.goto(f"{url}/console/review")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    while not page.locator("#item .graded").count():
        before = page.locator("#item").get_attribute("data-token")
        page.keyboard.press("1")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#item:not([data-token='{before}'])")
    first = page.locator(".graded .said").first.inner_text()
    for key in ("1", "9") if "Reissue" in first else ("3", "7"):  # the order is drawn
        page.keyboard.press(key)
    save(page, path, whole=True)
    page.keyboard.press("p")
    page.wait_for_selector("#begin")


def save(page: "Page", path: Path, *, whole: bool = False, part: str | None = None) -> None:
    """Save what a page, or a part of it, looks like, in few colours: the file is a third of the size."""
    from PIL import Image

    if part is None:
        page.screenshot(path=path, full_page=whole)
    else:
        page.locator(part).screenshot(path=path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
