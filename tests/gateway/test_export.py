"""Records as score logs: one file, many files, a window of time."""

import asyncio
import json

import pytest

from conformal_arbitrage import ScoreLog, ScoreParts, calibrate, verify
from conformal_arbitrage.collecting import records
from conformal_arbitrage.collecting.records import TimeWindow, score_log_of, write_record_parts
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import pages as stored_pages
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.pages import RecordFilter
from conformal_arbitrage.store.record import AuditBody, DecisionBody, Event, FeedbackBody, Grades, new_id
from conformal_arbitrage.types import Leg, Spent
from tests.certificates import altered
from tests.gateway.test_modes import command, exported, letters, shadowing

MODELS = {"primary": {"model": "small"}, "guardian": {"model": "large"}}


def leg(scores):
    return Leg(role="primary", scores=scores, spent=Spent(calls=1), seconds=0.2)


def menu_events(k, id, **more):
    """A shadow decision among 2 to 4 actions, or an audited one; every seventh has no Guardian score."""
    size = 2 + k % 3
    primary = Leg(
        role="primary",
        spent=Spent(calls=1),
        seconds=0.2,
        scores=tuple((k * 37 + j * 11) % 100 / 100 for j in range(size)),
    )
    body = DecisionBody(
        legs=(primary,), size=size, form="menu", mode="enforce", audited=k % 5 != 0,
        identities_sha256=fingerprint(MODELS), group="late" if k > 80 else None, **more,
    )  # fmt: skip
    yield Event(id=id, body=body, policy="support", key_id="caller", decided_by="primary")
    if k % 7 and body.audited:
        yield Event(id=id, body=AuditBody(scores=tuple((k * 13 + j * 29) % 100 / 100 for j in range(size))))


def text_events(k, id):
    """A graded shadow decision in free text."""
    primary = leg(((k * 37) % 100 / 100,))
    body = DecisionBody(
        legs=(primary,), size=2, form="text", mode="shadow", identities_sha256=fingerprint(MODELS), group=None
    )
    yield Event(id=id, body=body, policy="support", key_id="caller", decided_by="guardian")
    grader = {"kind": "judge", "model": "late" if k > 80 else "early"}
    yield Event(id=id, body=FeedbackBody(grades=Grades(primary=(k % 10) / 10, guardian=1.0), grader=grader))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Run something on a store with 100 decisions, read in pages of 9."""
    monkeypatch.setattr(records, "_PAGE", 9)

    def run(use, events=menu_events):
        async def filled():
            async with await open_store(str(tmp_path / f"{new_id()}.db")) as store:
                for k in range(100):
                    await store.run(stored_events.commit, list(events(k, new_id())))
                return await use(store)

        return asyncio.run(filled())

    return run


@pytest.mark.parametrize("events", [menu_events, text_events])
@pytest.mark.parametrize("rows", [23, 1000])
def test_many_files_are_the_rows_and_the_certificate_of_one(recorded, tmp_path, events, rows):
    async def both(store):
        log = await score_log_of(store, "support", identities=MODELS)
        await write_record_parts(
            store, "support", tmp_path / "log", rows_per_file=rows, window=TimeWindow(), identities=MODELS
        )
        return log

    log = recorded(both, events)
    files = sorted((tmp_path / "log").iterdir())
    assert [len(ScoreLog.read(path)) for path in files[:-1]] == [rows] * (len(files) - 1)
    assert len(files) == -(-len(log) // rows)
    log.write(tmp_path / "one.parquet")
    one, many = ScoreLog.read(tmp_path / "one.parquet"), ScoreParts.read(tmp_path / "log")
    assert many.gather("a test").sha256() == one.sha256()
    assert many.identities == one.identities == log.identities
    assert one.identities is not None
    for alpha in ("0.3", "0.5"):
        first, second = (calibrate(each, alpha, missing_guardian="worst_case") for each in (one, many))
        assert altered(second, log_sha256=first.evidence.log_sha256, created=first.provenance.created) == first
    assert verify(calibrate(many, "0.5", missing_guardian="worst_case"), many)


def test_only_one_file_is_held_and_none_stays_if_grades_arrive_meanwhile(recorded, tmp_path, monkeypatch):
    held = []
    write = ScoreLog.write

    async def interrupted(store):
        late = (await store.run(stored_pages.records, RecordFilter(policy="support"), limit=1))[0].id

        def note(log, path):
            held.append(len(log))
            write(log, path)

        async def pages(*arguments):
            async for page in decision_pages(*arguments):
                yield page
            body = FeedbackBody(grades=Grades(primary=0.5, guardian=1.0), grader={"kind": "judge", "model": "new"})
            await store.run(stored_events.commit, [Event(id=late, body=body)])

        monkeypatch.setattr(ScoreLog, "write", note)
        monkeypatch.setattr(records, "decision_pages", pages)
        with pytest.raises(StoreError, match="were recorded while they were exported"):
            await write_record_parts(
                store, "support", tmp_path / "log", rows_per_file=30, window=TimeWindow(), identities=MODELS
            )

    decision_pages = records.decision_pages
    recorded(interrupted, menu_events)
    assert held == [20, 30, 30]  # 80 of 100 are fit; the last file comes first
    assert list((tmp_path / "log").iterdir()) == []


def test_rows_that_go_while_they_are_exported_leave_no_files(recorded, tmp_path, monkeypatch):
    decision_pages = records.decision_pages
    times = []

    async def pages(*arguments):
        times.append(None)
        async for page in decision_pages(*arguments):
            yield page if len(times) == 1 else page[1:]

    monkeypatch.setattr(records, "decision_pages", pages)

    async def pruned(store):
        with pytest.raises(StoreError, match="export again"):
            await write_record_parts(store, "support", tmp_path / "log", rows_per_file=5, window=TimeWindow())

    recorded(pruned)
    assert list((tmp_path / "log").iterdir()) == []


def test_turns_of_sessions_are_not_cut(recorded, tmp_path):
    def turns(k, id):
        return menu_events(k, id, session="first")

    async def refused(store):
        with pytest.raises(StoreError, match="export it into one file"):
            await write_record_parts(store, "support", tmp_path / "log", rows_per_file=5, window=TimeWindow())
        with pytest.raises(StoreError, match="would cut sessions in two"):
            await score_log_of(store, "support", window=TimeWindow(since=1.0))

    recorded(refused, turns)
    assert not (tmp_path / "log").exists()


def test_a_window_of_time_includes_its_start_and_not_its_end(recorded, tmp_path):
    async def windows(store):
        log = await score_log_of(store, "support", everything=True)
        moments = [
            record.created
            for record in await store.run(stored_pages.records, RecordFilter(policy="support"), limit=1000)
        ][::-1]
        window = TimeWindow(since=moments[40], until=moments[60])
        ids = [str(id) for id, at in zip(log.id, moments, strict=True) if moments[40] <= at < moments[60]]
        chosen = await score_log_of(store, "support", everything=True, window=window)
        await write_record_parts(store, "support", tmp_path / "log", rows_per_file=6, window=window, everything=True)
        return ids, [str(id) for id in chosen.id]

    ids, chosen = recorded(windows)
    assert 0 < len(ids) < 100
    assert chosen == ids
    assert ScoreParts.read(tmp_path / "log").gather("a test").id.tolist() == ids


def test_the_command_writes_a_folder_that_calibrates(house):
    gateway = shadowing(house)
    letters(gateway, 30)
    one = exported(gateway, "--score-log")
    export = ["records", "export", "--policy", "support", "--config", gateway.path]
    folder = f"{gateway.folder / 'log'}/"
    shown = command(*export, "--score-log", "-o", folder, "--rows-per-file", 8, "--json")
    document = json.loads(shown.stdout)
    assert document["files"] == [f"part-0000{k}.parquet" for k in range(4)]
    assert (document["rows"], document["missing_guardian_rows"]) == (30, 0)
    first, second = calibrate(ScoreLog.read(one), 0.2), calibrate(ScoreParts.read(folder), 0.2)
    assert (first.relaxation, first.identities) == (second.relaxation, second.identities)
    assert "has part-0000" in command(*export, "--score-log", "-o", folder, code=2).stderr
    assert "cannot be a folder" in command(*export, "--all", "-o", f"{one}/x/", code=2).stderr
    assert "-o x.parquet/" in command(*export, "--all", "-o", "x.parquet", "--rows-per-file", 8, code=2).stderr
    assert "is no time" in command(*export, "--all", "-o", "x.parquet", "--since", "today", code=2).stderr
    for bounds in (["--since", "2199-01-01"], ["--until", "2001-01-01T00:00:00+01:00"]):
        for output in ("x.parquet", f"{gateway.folder}/x/"):
            assert "no decisions" in command(*export, "--all", "-o", output, *bounds, code=2).stderr
    shown = command(*export, "--all", "-o", f"{gateway.folder}/y/", "--since", "2001-01-01")
    assert "30 rows in 1 files, 0 without a Guardian score" in shown.stdout


@pytest.mark.parametrize("field", ["arbitrage.session", "user"])
def test_a_log_of_shadow_mode_has_one_turn_of_each_session_and_never_its_name(house, field):
    gateway = shadowing(house, policy={} if field != "user" else {"session": "user"})
    for number in range(12):
        name = f"conversation {number % 3}"
        named = {"user": name} if field == "user" else {"arbitrage": {"session": name, "actions": ["a", "b", "c"]}}
        body = {"model": "support", "messages": [{"role": "user", "content": f"letter {number}"}], **named}
        body.setdefault("arbitrage", {"actions": ["a", "b", "c"]})
        assert gateway.post("/v1/chat/completions", body).status_code == 200
    recorded = gateway.records()
    names = {record.decision.named for record in recorded}
    assert len(names) == 3
    assert not any("conversation" in str(name) for name in names)
    assert len(ScoreLog.read(exported(gateway, "--score-log"))) == 3
    folder = f"{gateway.folder / 'log'}/"
    command(
        "records",
        "export",
        "--policy",
        "support",
        "--score-log",
        "-o",
        folder,
        "--rows-per-file",
        2,
        "--config",
        gateway.path,
    )
    assert len(ScoreParts.read(folder).gather("a test")) == 3
