"""Count the calls between modules of this package that one chat request makes, and those that go up a layer.

    python -m benchmarks.crossings [--road calibrate] [--road review] [--list]

With `--road calibrate`, those of `arbitrage calibrate` on the bundled log. With `--road review`, the modules
that a decision by people enters, from the question to the reply, and one by a model does not. A call counts once, when its
function is entered, if caller and callee are in different modules of the package; resuming after an await does not count
again. Only the event loop's thread is watched, not the store's writer thread.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import chdir
from pathlib import Path
from types import FrameType
from typing import Any

from click.testing import CliRunner
from tests.gateway.house import CHAT, DECISION, MENU, UNSURE, House, says, votes
from tests.gateway.people import Later, PeopleHouse
from tests.scripted import Stream, chunk, ending, sse

from conformal_arbitrage.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "conformal_arbitrage."
Pair = tuple[str, str]
AUDITED = {"audit_rate": 1.0}


_BACKGROUND = tuple(f"{PACKAGE}gateway.{name}" for name in ("audits", "jobs", "watcher"))


class Watch:
    """A profile function that counts calls from one module of the package to another."""

    def __init__(self) -> None:
        self.calls: Counter[Pair] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()
        self._entered: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one event of the interpreter."""
        if event != "call" or frame in self._entered:  # entered before: it resumes after an await
            return
        self._entered.add(frame)
        callee = frame.f_globals.get("__name__", "")
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back else ""
        if _in_background(frame):  # no part of a request
            return
        if callee.startswith(PACKAGE) and caller.startswith(PACKAGE) and caller != callee:
            self.calls[caller, callee] += 1
            self.functions[
                caller.removeprefix(PACKAGE), f"{callee.removeprefix(PACKAGE)}.{frame.f_code.co_qualname}"
            ] += 1


def _in_background(frame: FrameType) -> bool:
    """Return whether a call was made, by however many steps, from what a gateway does beside answering."""
    below = frame.f_back
    while below is not None:
        if below.f_globals.get("__name__", "") in _BACKGROUND:
            return True
        below = below.f_back
    return False


def layers() -> dict[str, int]:
    """Return the height of each package, from the import rules."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = document["tool"]["importlinter"]["contracts"][0]["layers"]
    return {
        name.strip(): height
        for height, layer in enumerate(reversed(names))
        for name in layer.replace(":", "|").split("|")
    }


def upward(calls: Counter[Pair]) -> Counter[Pair]:
    """Return the calls whose callee is in a higher layer than the caller."""
    heights = layers()
    height = {pair: [heights.get(name.split(".")[1], 0) for name in pair] for pair in calls}
    return Counter({pair: n for pair, n in calls.items() if height[pair][1] > height[pair][0]})


def watched(house: House, body: dict[str, Any]) -> Watch:
    """Serve one request under watch, after others that filled the caches."""
    for _ in range(3):
        assert house.chat(body).status_code == 200
    watch = Watch()

    async def profile(function: Watch | None) -> None:
        sys.setprofile(function)

    house.run(profile(watch))
    house.chat(body)
    house.run(profile(None))
    return watch


def three_words(*_: object) -> Stream:
    """Reply as a Guardian that streams three words."""

    async def portions() -> AsyncIterator[bytes]:
        for word in ("one", " two", " three"):
            yield sse(chunk({"content": word}))
            await asyncio.sleep(0.01)  # a portion of its own
        yield ending()

    return Stream(portions())


def measure() -> dict[str, Watch]:
    """Serve one request of each kind and count its calls."""
    unsure = {"form": "text", "primary": says("mine", 0.1), "guardian": three_words}
    requests: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "menu, answered by the Primary": ({}, MENU),
        "text, answered by the Primary": ({"form": "text"}, CHAT),
        "text, a deferred stream of three words": (unsure, {**CHAT, "stream": True}),
    }
    results: dict[str, Watch] = {}
    for name, (options, body) in requests.items():
        with tempfile.TemporaryDirectory() as folder, House(Path(folder), **options) as house:
            results[name] = watched(house, body)
    return results


def modules(watch: Watch) -> set[str]:
    """Return the modules that calls went through."""
    return {name.removeprefix(PACKAGE) for pair in watch.calls for name in pair}


def decision_watched(house: House, decide: Callable[[], None]) -> Watch:
    """Make one decision under watch, after another that filled the caches."""
    decide()
    watch = Watch()

    async def profile(function: Watch | None) -> None:
        sys.setprofile(function)

    house.run(profile(watch))
    decide()
    house.run(profile(None))
    return watch


def review_modules() -> set[str]:
    """Return the modules that only a decision by people enters: asked over HTTP, taken, voted on, counted, replied to.

    Others are those of an audited decision by a model.
    """
    unsure = votes(*UNSURE)
    with tempfile.TemporaryDirectory() as folder, House(Path(folder), primary=unsure, policy=AUDITED) as house:
        house.headers = house.keyed("call")

        def by_model() -> None:
            assert house.decide(DECISION).status_code == 200

        usual = modules(decision_watched(house, by_model))
    with tempfile.TemporaryDirectory() as folder, PeopleHouse(Path(folder), primary=unsure) as house:
        house.headers, reviewer = house.keyed("call"), house.reviewer("ann")

        def by_people() -> None:
            call = Later(lambda: house.decide(DECISION))
            reviewer.decide(1)
            assert call.result().status_code == 200

        return modules(decision_watched(house, by_people)) - usual


def calibration() -> dict[str, Watch]:
    """Run `arbitrage calibrate` twice in an empty folder, the second time under watch."""
    log = ROOT / "src" / "conformal_arbitrage" / "data" / "science.parquet"
    columns = ["--primary-column", "qwen15b", "--guardian-column", "expert"]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        runner = CliRunner(env={"ARBITRAGE_SECRET": "a-long-random-text-for-this-count", "XDG_CONFIG_HOME": folder})
        shutil.copy(log, "log.parquet")
        for profile in (None, watch):
            sys.setprofile(profile)
            result = runner.invoke(cli, ["calibrate", "log.parquet", *columns, "--alpha", "0.1", "-o", "c.json"])
            sys.setprofile(None)
            assert result.exit_code == 0, result.output
    return {f"arbitrage calibrate, {len(modules(watch))} modules": watch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show every call")
    parser.add_argument("--road", choices=["request", "calibrate", "review"], default="request", help="what to count")
    arguments = parser.parse_args()
    if arguments.road == "review":
        print("modules of a review alone:", ", ".join(sorted(review_modules())))
        return
    for name, watch in (calibration() if arguments.road == "calibrate" else measure()).items():
        print(f"{name}: {watch.calls.total()} calls between modules, {upward(watch.calls).total()} to a higher layer")
        if arguments.list:
            for (caller, function), count in watch.functions.items():
                print(f"  {count:3} {caller} -> {function}")


if __name__ == "__main__":
    main()
