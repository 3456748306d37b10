import asyncio

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.errors import OptionError, ReplyError, ScoreLogError
from conformal_arbitrage.models import ReplayScorer
from conformal_arbitrage.scorelog.log import Usage
from conformal_arbitrage.types import Query, Spent

MENU = ("red", "green", "blue")


def log(primary=((0.2, 0.5, 0.3), (0.9, 0.1)), guardian=((0.1, 0.1, 0.8), (0.4, 0.6)), **rest):
    rest = {"id": ["a", "b"], "primary_usage": Usage(cost=np.array([0.25, 0.5])), **rest}
    return ScoreLog.from_arrays([list(p) for p in primary], [list(g) for g in guardian], **rest)


def score(scorer, id, actions=MENU, places=None):
    return asyncio.run(scorer.score(Query("Which?", actions, id=id, places=places)))


def written(tmp_path, text, name="log.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_each_id_has_the_scores_recorded_for_its_role():
    primary, guardian = ReplayScorer.of_log(log(), "primary"), ReplayScorer.of_log(log(), "guardian")
    assert score(primary, "a").values == (0.2, 0.5, 0.3)
    assert score(primary, "b", ("yes", "no")).values == (0.9, 0.1)
    assert score(guardian, "a").values == (0.1, 0.1, 0.8)
    assert score(guardian, "b", ("yes", "no")).values == (0.4, 0.6)


def test_the_recorded_cost_comes_with_the_scores_and_an_unrecorded_one_is_unknown():
    assert score(ReplayScorer.of_log(log(), "primary"), "b", ("yes", "no")).spent == Spent(calls=1, cost=0.5)
    assert score(ReplayScorer.of_log(log(), "guardian"), "a").spent == Spent(calls=1, cost=None)


def test_a_part_of_the_menu_gets_the_scores_of_its_places():
    guardian = ReplayScorer.of_log(log(), "guardian")
    whole = Query("Which?", MENU, id="a")
    assert asyncio.run(guardian.score(whole.only([2, 0]))).values == (0.8, 0.1)
    assert score(guardian, "a", ("green",), (1,)).values == (0.1,)


@pytest.mark.parametrize("id", ["c", None, "A"])
def test_an_id_that_was_not_recorded_is_an_error(id):
    with pytest.raises(ReplyError, match="no row with id"):
        score(ReplayScorer.of_log(log(), "primary"), id)


def test_more_actions_than_were_recorded_are_an_error():
    with pytest.raises(ReplyError, match="these 3 actions"):
        score(ReplayScorer.of_log(log(), "primary"), "b")
    with pytest.raises(ReplyError, match="nothing was recorded"):
        score(ReplayScorer.of_log(log(), "primary"), "b", ("maybe",), (2,))


def test_a_missing_opinion_is_an_error():
    with pytest.raises(ReplyError, match="nothing was recorded for id 'a'"):
        score(ReplayScorer.of_log(log(guardian=((None, 0.1, 0.8), (0.4, 0.6))), "guardian"), "a")
    with pytest.raises(ReplyError, match="nothing was recorded for id 'a'"):
        score(ReplayScorer.of_log(log(primary=((None, 0.1, 0.8), (0.4, 0.6))), "primary"), "a")


def test_a_log_without_ids_cannot_be_replayed():
    with pytest.raises(OptionError, match="id"):
        ReplayScorer.of_log(log(id=None), "primary")


def test_a_column_of_lists_is_read_from_a_file(tmp_path):
    rows = '{"id": "a", "cheap": [0.2, 0.5, 0.3]}\n{"id": "b", "cheap": [0.9, 0.1]}\n{"id": "c", "cheap": null}\n'
    scorer = ReplayScorer.read(written(tmp_path, rows), "cheap")
    assert score(scorer, "a").values == (0.2, 0.5, 0.3)
    assert score(scorer, "b", ("yes", "no")).values == (0.9, 0.1)
    assert score(scorer, "a").spent == Spent(calls=1, cost=None)
    with pytest.raises(ReplyError, match="nothing was recorded"):
        score(scorer, "c")


def test_an_answer_key_gives_one_to_the_right_action_and_zero_to_the_rest(tmp_path):
    scorer = ReplayScorer.read(written(tmp_path, "id,label\na,2\nb,0\n", "key.csv"), "label")
    assert score(scorer, "a").values == (0.0, 0.0, 1.0)
    assert score(scorer, "b").values == (1.0, 0.0, 0.0)
    assert score(scorer, "a", ("blue", "red"), (2, 0)).values == (1.0, 0.0)
    assert score(scorer, "a", ("red", "green"), (0, 1)).values == (0.0, 0.0)


@pytest.mark.parametrize("column", ["label", "id"])
def test_a_missing_column_is_reported_with_the_existing_ones(tmp_path, column):
    header = {"label": "id,other", "id": "name,label"}[column]
    path = written(tmp_path, f"{header}\na,1\n", "key.csv")
    with pytest.raises(ScoreLogError, match=f"no column '{column}'; it has {', '.join(sorted(header.split(',')))}"):
        ReplayScorer.read(path, "label")


def test_the_identity_is_the_content_and_the_column(tmp_path):
    rows = '{"id": "a", "cheap": [0.2, 0.8], "dear": [0.2, 0.8]}\n'
    path = written(tmp_path, rows)
    one = ReplayScorer.read(path, "cheap").identity
    assert one == ReplayScorer.read(written(tmp_path, rows, "copy.jsonl"), "cheap").identity
    assert (one["kind"], one["column"]) == ("replay", "cheap")
    changed = [
        '{"id": "a", "cheap": [0.2, 0.7]}\n',
        '{"id": "b", "cheap": [0.2, 0.8]}\n',
        '{"id": "a", "cheap": [0.2]}\n',
    ]
    others = [
        ReplayScorer.read(written(tmp_path, text, f"{k}.jsonl"), "cheap").identity for k, text in enumerate(changed)
    ]
    others.append(ReplayScorer.read(path, "dear").identity)
    assert one not in others
    assert len({repr(identity) for identity in others}) == len(others)


def test_each_role_of_a_log_has_its_own_identity():
    primary, guardian = (ReplayScorer.of_log(log(), role).identity for role in ("primary", "guardian"))
    assert primary != guardian
    assert primary == ReplayScorer.of_log(log(), "primary").identity
    assert primary != ReplayScorer.of_log(log(primary=((0.2, 0.5, 0.4), (0.9, 0.1))), "primary").identity
