import asyncio
import os
import pty
import sys
import termios

import pytest

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.scorers import Cache, HumanScorer
from conformal_arbitrage.scorers.human import Terminal
from conformal_arbitrage.types import Query, Spent
from tests.scorers.asking import QUERY

PROMPT = b"- to skip: "


class Person:
    """Whoever sits before the other end of a pseudo-terminal."""

    def __init__(self, master, slave, sit_down):
        self._master = master
        self._sit_down = sit_down
        self.slave = slave
        self.seen = b""

    def watch(self):
        self._sit_down()
        asyncio.get_running_loop().add_reader(self._master, self._look)

    def _look(self):
        self.seen += os.read(self._master, 4096)

    def press(self, keys):
        os.write(self._master, keys)

    async def asked(self, times=1):
        """Wait until that many questions are on the screen."""
        async with asyncio.timeout(10):
            while self.seen.count(PROMPT) < times:
                await asyncio.sleep(0.001)

    def mode(self):
        return termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)


@pytest.fixture
def person(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(os.dup(slave), "r") as stdin, os.fdopen(os.dup(slave), "w") as stderr:

        def sit_down():  # during the test, since pytest sets its own streams between setup and test
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "stderr", stderr)

        yield Person(master, slave, sit_down)
        monkeypatch.undo()
    os.close(slave)
    os.close(master)


@pytest.fixture
def pipe(monkeypatch):
    """A function that puts bytes into standard input, which is a pipe, and ends it."""
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
        await person.asked()
        person.press(key)
        async with asyncio.timeout(10):
            return await asking

    return asyncio.run(ask())


@pytest.mark.parametrize(("key", "place"), [(b"a", 0), (b"b", 1), (b"c", 2), (b"B", 1)])
def test_a_key_at_the_terminal_is_a_choice_without_a_new_line(person, key, place):
    found = answered(person, key)
    assert found.values == tuple(float(k == place) for k in range(3))
    assert found.raw == QUERY.actions[place]
    assert found.spent == Spent(calls=1, cost=None)


def test_the_person_sees_the_question_and_exactly_the_options_that_are_shown(person):
    answered(person, b"a", QUERY.only([2, 0]))
    screen = person.seen.decode().replace("\r\n", "\n")
    assert "Which of these is red?\n\n  a  grass\n  b  a rose\n\nKey" in screen
    assert "the sea" not in screen


def test_a_conversation_is_shown_as_its_transcript(person):
    answered(person, b"a", Query([{"role": "user", "content": "Which is red?"}], ("x", "y")))
    assert b"user: Which is red?" in person.seen


def test_a_skipped_question_is_an_endpoint_that_failed(person):
    with pytest.raises(UpstreamError, match="skipped") as caught:
        answered(person, b"-")
    assert caught.value.spent == Spent(calls=1, cost=None)
    assert not caught.value.retryable


def test_a_key_that_is_no_option_is_passed_over(person):
    async def ask():
        person.watch()
        asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
        await person.asked()
        for key in (b"d", b"7", b" ", b"\n", b"\xc3"):
            person.press(key)
            await asyncio.sleep(0.03)
            assert not asking.done()
        async with asyncio.timeout(10):
            while not asking.done():
                person.press(b"b")
                await asyncio.sleep(0.03)
        return await asking

    assert asyncio.run(ask()).values == (0, 1, 0)
    assert person.seen.count(PROMPT) == 1


def test_the_terminal_is_as_before_once_the_key_is_pressed(person):
    before = termios.tcgetattr(person.slave)
    modes = []

    async def ask():
        person.watch()
        asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
        await person.asked()
        modes.append(person.mode())
        person.press(b"a")
        await asking

    assert person.mode() != 0
    asyncio.run(ask())
    assert modes == [0]
    assert termios.tcgetattr(person.slave) == before


def test_the_terminal_is_as_before_when_the_asking_is_cancelled(person):
    before = termios.tcgetattr(person.slave)

    async def ask():
        person.watch()
        asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
        await person.asked()
        assert person.mode() == 0
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(ask())
    assert termios.tcgetattr(person.slave) == before


def test_questions_are_put_one_at_a_time(person):
    async def ask():
        person.watch()
        terminal = Terminal()
        scorers = [HumanScorer(name=name, terminal=terminal) for name in ("one", "two")]
        asking = [asyncio.create_task(scorer.score(QUERY)) for scorer in scorers]
        await person.asked()
        await asyncio.sleep(0.05)
        assert person.seen.count(PROMPT) == 1
        person.press(b"a")
        await person.asked(2)
        person.press(b"b")
        async with asyncio.timeout(10):
            return await asyncio.gather(*asking)

    assert [found.values for found in asyncio.run(ask())] == [(1, 0, 0), (0, 1, 0)]


def test_other_work_goes_on_while_the_person_thinks(person):
    async def ask():
        person.watch()
        asking = asyncio.create_task(HumanScorer(name="team").score(QUERY))
        await person.asked()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not asking.done()
        person.press(b"c")
        return await asking

    assert asyncio.run(ask()).values == (0, 0, 1)


async def ask_in_turn(count, query=QUERY):
    scorer = HumanScorer(name="team")
    async with asyncio.timeout(10):
        return [(await scorer.score(query)).values for _ in range(count)]


def test_through_a_pipe_each_line_is_an_answer(pipe, capsys):
    pipe(b"b\na\n\nC\n")
    assert asyncio.run(ask_in_turn(3)) == [(0, 1, 0), (1, 0, 0), (0, 0, 1)]
    assert capsys.readouterr().err.count(PROMPT.decode()) == 3


def test_a_line_that_is_no_option_is_passed_over(pipe, capsys):
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


def test_what_a_person_said_can_be_kept_for_another_day(pipe, capsys, tmp_path):
    pipe(b"b\n")

    async def ask():
        caches = []
        scorer = HumanScorer(
            name="team", through=lambda port: caches.append(Cache(port, tmp_path / "replies.sqlite")) or caches[0]
        )
        found = [(await scorer.score(QUERY)).values for _ in range(2)]
        caches[0].close()
        return found

    assert asyncio.run(ask()) == [(0, 1, 0)] * 2
    assert capsys.readouterr().err.count(PROMPT.decode()) == 1


def test_the_identity_is_who_answers():
    assert HumanScorer(name="team").identity == HumanScorer(name="team").identity
    assert HumanScorer(name="team").identity != HumanScorer(name="expert").identity
    assert HumanScorer(name="team").identity["kind"] == "human"
