import asyncio
import os
import pty
import sys
import termios

import pytest

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.models import Cache, HumanScorer
from conformal_arbitrage.models.kinds import Terminal
from conformal_arbitrage.types import Query, Spent
from tests.models.asking import QUERY

PROMPT = b"- to skip: "


class Person:
    """The person at the other end of a pseudo-terminal."""

    def __init__(self, master, slave, attach):
        self._master = master
        self._attach = attach
        self.slave = slave
        self.seen = b""

    def watch(self):
        self._attach()
        asyncio.get_running_loop().add_reader(self._master, self._look)

    def _look(self):
        self.seen += os.read(self._master, 4096)

    def press(self, keys):
        os.write(self._master, keys)

    async def prompted(self, times=1):
        """Wait until that many prompts are on the screen."""
        async with asyncio.timeout(60):
            while self.seen.count(PROMPT) < times:
                await asyncio.sleep(0.001)

    def mode(self):
        return termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)


@pytest.fixture
def person(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(os.dup(slave), "r") as stdin, os.fdopen(os.dup(slave), "w") as stderr:

        def attach():  # during the test, since pytest sets its own streams between setup and test
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "stderr", stderr)

        yield Person(master, slave, attach)
        monkeypatch.undo()
    os.close(slave)
    os.close(master)


@pytest.fixture
def pipe(monkeypatch):
    """Return a function that writes bytes to standard input, a pipe, and closes it."""
    reading, writing = os.pipe()

    def put(data):
        os.write(writing, data)
        os.close(writing)

    with os.fdopen(reading, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield put
        monkeypatch.undo()


def answered(person, key, query=QUERY):
    async def ask():
        person.watch()
        asking = asyncio.create_task(HumanScorer(name="team").score(query))
        await person.prompted()
        person.press(key)
        async with asyncio.timeout(60):
            return await asking

    return asyncio.run(ask())


@pytest.mark.parametrize(("key", "place"), [(b"a", 0), (b"b", 1), (b"c", 2), (b"B", 1)])
def test_a_key_press_at_the_terminal_chooses_without_enter(person, key, place):
    result = answered(person, key)
    assert result.values == tuple(float(k == place) for k in range(3))
    assert result.raw == QUERY.actions[place]
    assert result.spent == Spent(calls=1, cost=None)


def test_the_person_sees_the_question_and_exactly_the_options_that_are_shown(person):
    answered(person, b"a", QUERY.only([2, 0]))
    screen = person.seen.decode().replace("\r\n", "\n")
    assert "Which of these is red?\n\n  a  grass\n  b  a rose\n\nKey" in screen
    assert "the sea" not in screen


def test_a_conversation_is_shown_as_its_transcript(person):
    answered(
        person,
        b"a",
        Query([{"role": "system", "content": "Look."}, {"role": "user", "content": "Which is red?"}], ("x", "y")),
    )
    assert b"user: Which is red?" in person.seen


def test_a_skipped_question_is_an_upstream_error(person):
    with pytest.raises(UpstreamError, match="skipped") as caught:
        answered(person, b"-")
    assert caught.value.spent == Spent(calls=1, cost=None)
    assert not caught.value.retryable


async def test_a_key_without_an_option_is_ignored(person):
    person.watch()
    asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
    await person.prompted()
    for key in (b"d", b"7", b" ", b"\n", b"\xc3"):
        person.press(key)
        await asyncio.sleep(0.03)
        assert not asking.done()
    async with asyncio.timeout(60):
        while not asking.done():
            person.press(b"b")
            await asyncio.sleep(0.03)
    assert (await asking).values == (0, 1, 0)
    assert person.seen.count(PROMPT) == 1


async def test_the_terminal_mode_is_restored_after_the_key_press(person):
    before = termios.tcgetattr(person.slave)
    modes = []
    assert person.mode() != 0
    person.watch()
    asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
    await person.prompted()
    modes.append(person.mode())
    person.press(b"a")
    await asking
    assert modes == [0]
    assert termios.tcgetattr(person.slave) == before


async def test_the_terminal_mode_is_restored_after_a_cancellation(person):
    before = termios.tcgetattr(person.slave)
    person.watch()
    asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
    await person.prompted()
    assert person.mode() == 0
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert termios.tcgetattr(person.slave) == before


def test_questions_are_shown_one_at_a_time(person):
    async def ask():
        person.watch()
        terminal = Terminal()
        scorers = [HumanScorer(name=name, terminal=terminal) for name in ("one", "two")]
        asking = [asyncio.create_task(scorer.score(QUERY)) for scorer in scorers]
        await person.prompted()
        await asyncio.sleep(0.05)
        assert person.seen.count(PROMPT) == 1
        person.press(b"a")
        await person.prompted(2)
        person.press(b"b")
        async with asyncio.timeout(60):
            return await asyncio.gather(*asking)

    assert [result.values for result in asyncio.run(ask())] == [(1, 0, 0), (0, 1, 0)]


async def test_other_work_goes_on_while_the_person_thinks(person):
    person.watch()
    asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
    await person.prompted()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not asking.done()
    person.press(b"c")
    assert (await asking).values == (0, 0, 1)


async def ask_in_turn(count, query=QUERY):
    scorer = HumanScorer(name="team")
    async with asyncio.timeout(60):
        return [(await scorer.score(query)).values for _ in range(count)]


def test_through_a_pipe_each_line_is_an_answer(pipe, capsys):
    pipe(b"b\na\n\nC\n")
    assert asyncio.run(ask_in_turn(3)) == [(0, 1, 0), (1, 0, 0), (0, 0, 1)]
    assert capsys.readouterr().err.count(PROMPT.decode()) == 3


def test_a_line_without_an_option_is_ignored(pipe, capsys):
    pipe(b"z\n9\nb\n")
    assert asyncio.run(ask_in_turn(1)) == [(0, 1, 0)]


@pytest.mark.parametrize("data", [b"", b"z\n", b"-\n"])
def test_the_end_of_input_counts_as_skipping(pipe, capsys, data):
    pipe(data)
    with pytest.raises(UpstreamError, match="skipped"):
        asyncio.run(ask_in_turn(1))


def test_more_options_than_keys_are_refused_before_anything_is_shown(pipe, capsys):
    pipe(b"a\n")
    with pytest.raises(UpstreamError, match="27 options"):
        asyncio.run(ask_in_turn(1, Query("q", tuple(f"option {k}" for k in range(27)))))
    assert capsys.readouterr().err == ""


async def test_a_persons_choices_can_be_cached(pipe, capsys, tmp_path):
    pipe(b"b\n")
    caches = []
    scorer = HumanScorer(
        name="team", through=lambda port: caches.append(Cache(port, tmp_path / "replies.sqlite")) or caches[0]
    )
    values = [(await scorer.score(QUERY)).values for _ in range(2)]
    caches[0].close()
    assert values == [(0, 1, 0)] * 2
    assert capsys.readouterr().err.count(PROMPT.decode()) == 1


def test_the_identity_is_who_answers():
    assert HumanScorer(name="team").identity == HumanScorer(name="team").identity
    assert HumanScorer(name="team").identity != HumanScorer(name="expert").identity
    assert HumanScorer(name="team").identity["kind"] == "human"
