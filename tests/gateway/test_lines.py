"""The log of the process: lines of JSON written by a thread, whatever the descriptor is like."""

import json
import logging
import os
import sys
import threading
import warnings
from contextlib import suppress

import pytest

from conformal_arbitrage.gateway.server import LogLines, logging_to
from tests.gateway.house import until


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def written(reading, lines):
    """Everything written, once the lines are closed."""
    lines.close()
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 2**20)
    except BlockingIOError:
        return b""


def test_lines_are_written_together_and_soon(pipe):
    lines = LogLines(pipe[1])
    lines.add(b"one")
    lines.add(b"two")
    assert os.read(pipe[0], 100) == b"one\ntwo\n"
    lines.add(b"three")
    assert written(pipe[0], lines) == b"three\n"


def test_a_pipe_that_nobody_reads_costs_lines_and_blocks_nobody(pipe):
    lost = []
    lines = LogLines(pipe[1], dropped=lambda: lost.append(1), most_waiting=100)
    for _ in range(10):
        for _ in range(1000):
            lines.add(b"x" * 100)
        until(lambda: not lines._waiting or lost)
    assert lost
    assert len(lines._waiting) <= 100


def test_the_end_waits_for_a_reader_but_not_for_ever(pipe):
    lines = LogLines(pipe[1])
    for _ in range(2000):
        lines.add(b"x" * 100)
    lines.close()
    assert lines._thread.is_alive()  # blocked in its write; the process can end nevertheless
    os.set_blocking(pipe[0], False)  # the thread may end between the question and the reading
    while lines._thread.is_alive():
        with suppress(BlockingIOError):
            os.read(pipe[0], 2**16)


def test_a_descriptor_that_refuses_is_written_to_again(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    good = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    lost = []
    lines = LogLines(full, dropped=lambda: lost.append(1))
    lines.add(b"lost")
    until(lambda: lost)
    os.dup2(good, full)
    lines.add(b"kept")
    lines.close()
    os.close(full)
    os.close(good)
    assert (tmp_path / "log").read_text() == "kept\n"
    assert lost == [1]


def test_everything_a_process_says_is_a_line_of_json_with_time_level_policy_and_id(pipe):
    lines = LogLines(pipe[1])
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    handlers = logging.getLogger().handlers[:]
    with logging_to(lines):
        logging.getLogger("uvicorn.error").warning("a forged\nline")
        logging.getLogger("x").error("of a policy", extra={"policy": "support", "id": "7"})
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join(60)
        sys.excepthook(ValueError, ValueError("fatal"), None)
        sys.unraisablehook(_Unraisable())
    documents = [json.loads(line) for line in written(pipe[0], lines).splitlines()]
    assert [(d["level"], d["policy"], d["id"]) for d in documents] == [
        ("warning", "", ""), ("error", "support", "7"), ("warning", "", ""), ("error", "", ""), ("critical", "", ""),
        ("error", "", ""),
    ]  # fmt: skip
    assert documents[0]["message"] == "a forged\nline"
    assert "ZeroDivisionError" in documents[3]["exception"]
    assert "ValueError: fatal" in documents[4]["exception"]
    assert all(d["time"].endswith("Z") for d in documents)
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == hooks
    assert logging.getLogger().handlers == handlers


class _Unraisable:
    err_msg, object = None, "a finalizer"
    exc_value = OSError("late")
