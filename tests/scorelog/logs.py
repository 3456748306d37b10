"""Score logs that several tests share."""

import json

import numpy as np

from conformal_arbitrage import ScoreLog, Usage

ROWS = [
    {"id": "a", "primary": [0.9, 0.1], "guardian": [1, 0], "label": 0, "context": 'q, "1"', "tag": "t1"},
    {"id": "b", "primary": [0.2, 0.3, 0.5], "guardian": [0, 0.25, 1], "label": 2, "context": "é\nü", "tag": "t2"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sample():
    return ScoreLog.from_arrays(
        [[0.1 + 0.2, 0.1], [0.2, None, 0.5], [1 / 3]],
        [[1.0, 0.0], [0.0, 0.25, 1.0], None],
        id=["a", "b", 3],
        label=[0, 2, 0],
        group=["x", "y", "x"],
        context=['with "quotes", and commas', "é\nü", ""],
        actions=[["yes", "no"], ["1", "2", "it's"], ["only"]],
        outcomes={"severity": [[0, 3], [1, 2, 0], [0.5]]},
        primary_usage=Usage(cost=[0.1, 0.2, 0.3], input_tokens=[1, 2, 3], output_tokens=[4, 5, 6]),
        identities={"primary": {"kind": "function", "name": "p"}, "guardian": {"kind": "label"}},
    )


def assert_same(log, other):
    assert log.sha256() == other.sha256()
    for name in (
        "primary",
        "guardian",
        "offsets",
        "no_opinion",
        "missing",
        "label",
        "id",
        "group",
        "context",
        "actions",
    ):
        left, right = getattr(log, name), getattr(other, name)
        assert np.array_equal(left, right, equal_nan=getattr(left, "dtype", None) == np.float64), name
    assert log.score_digits == other.score_digits
    assert set(log.lists) == set(other.lists)
    for name in log.lists:
        assert np.array_equal(log.lists[name], other.lists[name], equal_nan=True)
    assert np.array_equal(log.primary_usage.cost, other.primary_usage.cost)
    assert np.array_equal(log.primary_usage.input_tokens, other.primary_usage.input_tokens)
    assert log.identities == other.identities


GOOD = {"id": "a", "primary": [0.1, 0.2], "guardian": [0, 1], "label": 1}
BAD_ROWS = [
    ({"primary": "x"}, "row 2, column 'primary': 'x' is not a list of numbers"),
    ({"primary": [0.1, "0.2"]}, "row 2, column 'primary'.*is not a list of numbers"),
    ({"primary": [True, False]}, "row 2, column 'primary'"),
    ({"primary": [[0.1], [0.2]]}, "row 2, column 'primary'"),
    ({"primary": []}, "row 2, column 'primary': an empty list"),
    ({"guardian": [0, 1, 1]}, "row 2, column 'guardian': 3 scores for 2 actions"),
    ({"primary": [0.1, float("inf")]}, "row 2, column 'primary': inf is infinite"),
    ({"guardian": [0, float("-inf")]}, "row 2, column 'guardian': -inf is infinite"),
    ({"primary": None, "guardian": None}, "row 2, column 'primary': neither model has scores"),
    ({"id": "a"}, "row 2, column 'id': 'a' is also the id of row 1"),
    ({"id": None}, "row 2, column 'id': the id is empty"),
    ({"label": 2}, "row 2, column 'label': 2 is not the index of one of 2 actions"),
    ({"label": 0.5}, "row 2, column 'label': 0.5"),
    ({"label": None}, "row 2, column 'label': nan"),
    ({"primary": "[1.5.5, 0]"}, "row 2, column 'primary'.*is not a list of numbers"),
    ({"primary": "[--1, 0]"}, "row 2, column 'primary'.*is not a list of numbers"),
    ({"primary_cost": -1}, "row 2, column 'primary_cost': -1 must be"),
    ({"correct": [1, 0, 0]}, "row 2, column 'correct': 3 entries for 2 actions"),
]
