"""Someone who can write to the database, and does not hold the project's secret, changes nothing unnoticed."""

import asyncio
import json
import os
import random
import shutil
import sqlite3
import time

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import claims, events, integrity, outbox, policies
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store.claims import Claim, SavedResponse
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import FeedbackBody, MenuQuestion
from tests.gateway.durability import OURS, SECRET, Gateway, decision_request, encoded, run_sql, write_config
from tests.store.facts import decide, decision, later

KEYS = OURS.record_keys
JSON = {"Content-Type": "application/json"}
FUZZES = int(os.environ.get("FUZZED_FILES", "60"))
LAST = "select writer from events group by writer order by count(*) desc limit 1"


async def filled(where, count=12, keys=KEYS):
    """A store that holds some of everything, closed again, as a gateway leaves it."""
    async with await open_store(where, keys=keys) as store:
        await integrity.seal(store, everything=True)
        await store.run(events.commit, [decision() for _ in range(count)])
        [id] = await decide(store)
        await store.run(events.commit, [later(id, FeedbackBody(comment="well done"))])
        for name in ("one", "two"):
            claim = await store.run(claims.take, "k1", name, "0" * 64, lease=9)
            if isinstance(claim, SavedResponse):
                continue
            reply = SavedResponse(status=200, headers={"a": "b"}, body=f"reply {name}".encode())
            await store.run(events.commit, [decision()], claim=claim, response=reply)
        await store.run(policies.install, "support", {"alpha": 0.05}, by="k1")
        await store.run(policies.install, "support", {"alpha": 0.1}, by="k1")
        await store.run(policies.install, "sales", {"alpha": 0.2}, by="k1")


def verified(where, copy=None, keys=KEYS):
    async def check():
        async with await open_store(where, keys=keys) as store:
            return await integrity.verify(store, copy)

    return asyncio.run(check())


def head_of(where):
    async def read():
        async with await open_store(where, keys=KEYS) as store:
            return await store.run(integrity.head)

    return asyncio.run(read())


CUT_TAIL = f"delete from events where writer = ({LAST}) and seq > 5"
TOMBSTONE = (
    "update events set id = null, kind = null, at = null, body = null, policy = null, key_id = null, decided_by = null "
)
DAMAGE = {
    "a cut tail": ([CUT_TAIL], "events 6 to"),
    "a cut tail and its head": ([CUT_TAIL, "delete from heads"], "signed head was removed"),
    "a cut tail under a forged head": ([CUT_TAIL, "update heads set seq = 5"], "is not signed"),
    "a removed writer": (["delete from events", "delete from heads"], "its events and its signed head were removed"),
    "all events removed": (["delete from events"], "all its events were removed"),
    "an event turned into a tombstone": ([TOMBSTONE + "where seq = 3"], "no valid signature says so"),
    "the last event turned into a tombstone": ([TOMBSTONE + "where seq = 12"], "no valid signature says so"),
    "a forged seal": ([TOMBSTONE + ", seal = '00000000:00' where seq = 3"], "no valid signature says so"),
    "a forged checkpoint": (
        ["insert into checkpoints (writer, seq, hash) select writer, seq, hash from events where seq = 5",
         "delete from events where seq <= 5"],
        "its checkpoint at event 5 is not signed",
    ),
    "a shorter list of writers": (["update roster set document = '{}'"], "is not as it was signed"),
    "no list of writers": (["delete from roster"], "there is no signed list of writers"),
    "an edited reply": (["update replays set status = 500 where name = 'one'"], "idempotency key 'one' was changed"),
    "an edited policy": (
        ["""update policies set certificate = '{"alpha":0.9}' where name = 'sales'"""], "policy sales, version 1: it is not",
    ),
    "a policy under another name": (["update policies set name = 'other' where name = 'sales'"], "policy sales"),
    "a removed version": (["delete from policies where name = 'support' and version = 2"], "version 2 was removed"),
    "a version removed from the middle": (
        ["delete from policies where name = 'support' and version = 1"], "version 1 was removed",
    ),
    "a forged writer": (
        ["insert into events (writer, seq, hash, id, kind, at, body) values ('0f', 1, 'x', 'i', 'audit', 1, '{}')"],
        "no secret vouches for its events",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_was_changed_behind_the_gateway_s_back_is_found(where, name):
    statements, finding = DAMAGE[name]
    asyncio.run(filled(where))
    assert verified(where) == []
    for statement in statements:
        run_sql(where, statement)
    faults = verified(where)
    assert any(finding in fault for fault in faults), faults


def test_a_state_taken_back_as_a_whole_shows_against_a_copy_kept_elsewhere(tmp_path):
    path, backup = str(tmp_path / "store.db"), tmp_path / "backup.db"
    asyncio.run(filled(path))
    shutil.copy(path, backup)
    asyncio.run(filled(path))
    copy = msgspec.json.decode(msgspec.json.encode(head_of(path)), type=Head)
    assert verified(path, copy) == []
    shutil.copy(backup, path)
    assert verified(path) == [], "an earlier state is a consistent one"
    faults = verified(path, copy)
    assert any("all its events were removed; the copy of the head has" in fault for fault in faults)
    assert any("policy support: version 4 was removed; the copy" in fault for fault in faults)


def test_everything_removed_shows_against_a_copy_and_a_forged_copy_shows_too(where):
    asyncio.run(filled(where))
    copy = head_of(where)
    forged = msgspec.structs.replace(copy, writers={})
    assert verified(where, forged) == ["the copy of the head is not as `arbitrage records head` signed it"]
    for table in ("events", "heads", "roster", "policies", "replays"):
        run_sql(where, f"delete from {table}")
    faults = verified(where, copy)
    assert any("all its events were removed" in fault for fault in faults)
    assert sum("was removed; the copy of the head has it" in fault for fault in faults) == 2


def test_pruned_and_erased_records_verify_also_against_an_older_copy(where):
    async def story():
        async with await open_store(where, keys=KEYS) as store:
            ids = await decide(store, 3)
            await store.run(events.commit, [later(ids[0], FeedbackBody(comment="secret"))])
            copy = await store.run(integrity.head)
            assert await integrity.erase(store, ids[0])
            assert await integrity.verify(store, copy) == []
            await integrity.prune(store, before=time.time() + 1)
            await integrity.seal(store)
            assert await integrity.verify(store, copy) == []
            await decide(store, 3)
        return copy

    asyncio.run(filled(where))
    copy = asyncio.run(story())
    assert verified(where, copy) == []


def test_pruning_removes_no_trace_of_a_change(where):
    asyncio.run(filled(where))
    run_sql(where, "update events set at = 1 where seq = 3")  # so that it looks old enough
    run_sql(where, TOMBSTONE + "where seq in (1, 2)")

    async def prune():
        async with await open_store(where, keys=KEYS) as store:
            await integrity.prune(store, before=1000)

    asyncio.run(prune())
    faults = verified(where)
    assert [", event 1 (" in fault or ", event 2 (" in fault or ", event 3 (" in fault for fault in faults[:3]] == [
        True
    ] * 3


async def start(where):
    """Sign what is there, as a gateway does when it starts."""
    async with await open_store(where, keys=KEYS) as store:
        await integrity.seal(store, everything=True)


@pytest.mark.parametrize("filling", [True, False], ids=["filled", "empty"])
def test_a_database_that_was_made_without_the_secret_is_refused_at_start(where, filling):
    async def create():
        await (await open_store(where)).close()

    asyncio.run(filled(where, keys=()) if filling else create())
    assert any("no signed list of writers" in fault for fault in verified(where))
    with pytest.raises(StoreError, match="made the database without the project's secret; run `arbitrage records"):
        asyncio.run(start(where))


def test_a_database_without_its_list_of_writers_is_refused_at_start_and_never_gets_another(where):
    asyncio.run(filled(where))
    run_sql(where, "delete from roster")
    with pytest.raises(StoreError, match="no signed list of writers: someone removed"):
        asyncio.run(filled(where))
    assert run_sql(where, "select count(*) from roster") == [(0,)]


def test_forged_events_are_not_signed_once_everything_that_vouches_was_removed(where):
    asyncio.run(filled(where))
    for table in ("events", "heads", "roster", "checkpoints", "policies", "replays"):
        run_sql(where, f"delete from {table}")
    with pytest.raises(StoreError, match="no signed list of writers"):
        asyncio.run(start(where))
    run_sql(
        where, "insert into events (writer, seq, hash, id, kind, at, body) values ('0f', 1, 'x', 'i', 'audit', 1, '{}')"
    )
    with pytest.raises(StoreError, match="no signed list of writers"):
        asyncio.run(start(where))
    assert any("nothing vouches for this database" in fault for fault in verified(where))


def test_a_list_of_writers_that_was_changed_is_refused_at_start_and_an_earlier_one_shows(where):
    asyncio.run(filled(where))
    [(document, seal)] = run_sql(where, "select document, seal from roster")
    asyncio.run(filled(where))
    run_sql(where, f"update roster set document = '{document}', seal = '{seal}'")
    assert any("the signed list of writers is an earlier one" in fault for fault in verified(where))
    run_sql(where, "update roster set document = '{}'")
    with pytest.raises(StoreError, match="a list of writers that is not as it was signed"):
        asyncio.run(start(where))


ADMIN, CALL = "a" * 64, "b" * 64
KEY_ROW = (
    "insert into keys (id, sha256, scope, label, created, seal) select 'new', '{0}', 'admin', label, created, seal "
    "from keys where id = 'caller'"
)
FORGED_KEYS = {
    "inserted": KEY_ROW.format("c" * 64),
    "promoted": "update keys set scope = 'admin' where id = 'caller'",
    "moved to another's digest": f"update keys set sha256 = '{'c' * 64}' where id = 'caller'",
    "no longer bound": "update keys set policies = null where id = 'caller'",
    "no longer ending": "update keys set expires = null where id = 'caller'",
    "no longer revoked": "update keys set revoked = null where id = 'revoked'",
    "renamed": "update keys set id = 'other' where id = 'caller'",
}


@pytest.mark.parametrize("name", FORGED_KEYS)
async def test_a_key_that_was_inserted_or_edited_does_not_work_and_is_named(where, name, caplog):
    async with await open_store(where, keys=KEYS) as store:
        scoped = {"scope": "call", "label": "shop", "policies": ["support"]}
        await store.run(stored_keys.create, id="caller", sha256=CALL, expires=time.time() + 60, **scoped)
        await store.run(stored_keys.create, id="revoked", sha256="d" * 64, scope="admin", label="")
        await store.run(stored_keys.revoke, "revoked")
        assert (await store.run(stored_keys.find, CALL)).policies == ("support",)
        assert await integrity.verify(store) == []
        run_sql(where, FORGED_KEYS[name])
        works = [await store.run(stored_keys.find, digest) for digest in (CALL, "c" * 64, "d" * 64)]
        shown = {key.id: key.intact for key in await store.run(stored_keys.list_all)}
        faults = await integrity.verify(store)
    forged = {"inserted": "new", "no longer revoked": "revoked", "renamed": "other"}.get(name, "caller")
    assert all(key is None or (key.id != forged and key.intact) for key in works)
    assert [id for id, intact in shown.items() if not intact] == [forged]
    assert f"key '{forged}': it is not what was created" in faults
    assert f"key '{forged}' was inserted or changed" in caplog.text


async def test_a_key_from_before_it_was_revoked_does_not_work_and_a_deleted_one_is_missed(where):
    async with await open_store(where, keys=KEYS) as store:
        assert not await store.run(stored_keys.exist)
        await store.run(stored_keys.create, id="caller", sha256=CALL, scope="call", label="")
        [(seal,)] = run_sql(where, "select seal from keys")
        await store.run(stored_keys.revoke, "caller")
        run_sql(where, f"update keys set revoked = null, seal = '{seal}'")
        assert await store.run(stored_keys.find, CALL) is None
        await store.run(stored_keys.revoke, "caller")  # which does not vouch for it
        assert not (await store.run(stored_keys.list_all))[0].intact
        run_sql(where, "delete from keys")
        assert await store.run(stored_keys.exist), "or everybody would be let in without one"
        faults = await integrity.verify(store)
    assert faults == ["key caller: it was removed; the signed list has it"]


async def test_a_sign_in_that_was_inserted_or_edited_is_none(where):
    async with await open_store(where, keys=KEYS) as store:
        for id, digest in (("boss", ADMIN), ("other", CALL)):
            await store.run(stored_keys.create, id=id, sha256=digest, scope="admin", label="")
        await store.run(stored_keys.sign_in, "1" * 64, "other", seconds=60)
        assert (await store.run(stored_keys.find_sign_in, "1" * 64)).key_id == "other"
        run_sql(where, "insert into sign_ins (sha256, key_id, created, seen, expires, seal) "
                       f"select '{'2' * 64}', 'boss', created, seen, expires, seal from sign_ins")  # fmt: skip
        assert await store.run(stored_keys.find_sign_in, "2" * 64) is None
        run_sql(where, "update sign_ins set key_id = 'boss'")
        assert await store.run(stored_keys.find_sign_in, "1" * 64) is None
        faults = await integrity.verify(store)
    assert faults == ["a sign-in to the console with key 'boss' is not what was written"]


def test_a_changed_reply_is_not_sent_and_a_rotated_secret_still_verifies(where):
    asyncio.run(filled(where))
    run_sql(where, "update replays set body = 'x' where name = 'one'" if "://" not in where else
            "update replays set body = 'x'::bytea where name = 'one'")  # fmt: skip

    async def story():
        async with await open_store(where, keys=(b"n" * 32, *KEYS)) as store:
            with pytest.raises(Exception, match="was changed"):
                await store.run(claims.take, "k1", "one", "0" * 64, lease=1)
            assert isinstance(await store.run(claims.take, "k1", "two", "0" * 64, lease=1), SavedResponse)
            assert isinstance(await store.run(claims.take, "k1", "three", "0" * 64, lease=1), Claim)
            await decide(store, 3)
            await integrity.seal(store)
            faults = await integrity.verify(store)
        return faults

    assert asyncio.run(story()) == ["the response under the idempotency key 'one' was changed"]
    assert any("need a secret that is not at hand" in fault for fault in verified(where))


async def test_an_open_audit_keeps_its_question_and_is_pruned_once_closed(where):
    async with await open_store(where, keys=KEYS) as store:
        [id] = await decide(store)
        question = MenuQuestion(context="?", actions=("a", "b"))
        await store.run(events.commit, [], audits=[Audit(id=id, policy="support", question=question)])
        assert await integrity.prune(store, before=time.time() + 1) == 0
        [audit] = await store.run(outbox.take_audits, limit=1, lease=1)
        assert audit.question == question


async def served(path, count, kill):
    """A real gateway answers some requests, and ends properly or not."""
    gateway = Gateway(path)
    async with gateway, aiohttp.ClientSession(gateway.url) as session:
        for k in range(count):
            url, body = decision_request(f"q{random.random()}-{k}")
            async with session.post(url, data=encoded(body), headers=JSON) as reply:
                assert reply.status == 200
        if kill:
            await asyncio.sleep(1.5)
            await gateway.kill()


@pytest.mark.proof
@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_a_gateway_signs_within_a_second_and_when_it_stops(where, tmp_path, monkeypatch, kill):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    path = write_config(tmp_path, where, audit_rate=0.0)
    asyncio.run(served(path, 9, kill))
    assert run_sql(where, "select sum(seq) from heads") == run_sql(where, "select count(*) from events") == [(9,)]
    copy = tmp_path / "head.json"
    copy.write_text(invoke("head", path))
    assert json.loads(invoke("verify", path, "--head", str(copy), "--json")) == {
        "ok": True, "problems": [], "head_events": 9,
    }  # fmt: skip
    shown = invoke("verify", path, "--head", str(copy))
    assert f"Compared with {copy} of 20" in shown
    assert "which covers 9 events: the record still accounts for all of them." in shown
    run_sql(where, "delete from events where seq > 1")
    asyncio.run(served(path, 2, kill=False))  # a start signs nothing that is missing
    for more in ([], ["--head", str(copy)]):
        assert "were removed" in invoke("verify", path, *more, code=1)


def invoke(command, path, *rest, code=0):
    result = CliRunner().invoke(main, ["records", command, "--config", str(path), *rest])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout


def damaged(data, rng):
    """A file with some bytes flipped, cut, repeated or zeroed."""
    content = bytearray(data)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.choice((1, 3, 40))):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 1:
            del content[rng.randrange(len(content)) :]
        case 2:
            start = rng.randrange(len(content))
            content[start : start + rng.choice((16, 512, 4096))] = os.urandom(64)
        case 3:
            start = rng.randrange(len(content))
            size = rng.choice((100, 4096))
            content[start : start + size] = bytes(min(size, len(content) - start))
    return bytes(content)


def test_a_damaged_file_gives_findings_and_never_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    original = tmp_path / "original.db"
    asyncio.run(filled(str(original), count=60))
    with sqlite3.connect(original) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    data, path = original.read_bytes(), write_config(tmp_path, "store.db")
    rng, found = random.Random(7), 0
    for _ in range(FUZZES):
        for old in tmp_path.glob("store.db*"):
            old.unlink()
        content = damaged(data, rng)
        (tmp_path / "store.db").write_bytes(content)
        result = CliRunner().invoke(main, ["records", "verify", "--json", "--config", str(path)])
        assert result.exit_code in (0, 1), result.output
        assert isinstance(result.exception, SystemExit | None)
        problems = json.loads(result.stdout)["problems"]
        assert (result.exit_code == 1) == bool(problems)
        found += bool(problems)
    assert found > FUZZES / 2, found  # the rest hit free space


def test_an_empty_or_missing_file_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    path = write_config(tmp_path, "store.db")
    assert "there is no database" in invoke("verify", path, code=1)
    (tmp_path / "store.db").write_bytes(b"")
    assert "there is no database" in invoke("verify", path, code=1)
    assert (tmp_path / "store.db").stat().st_size == 0


def test_a_revoked_key_that_is_put_back_with_the_list_of_then_shows_against_a_copy(tmp_path):
    path, backup = str(tmp_path / "store.db"), tmp_path / "backup.db"

    async def with_key(act):
        async with await open_store(path, keys=KEYS) as store:
            return await act(store)

    create = {"id": "k1", "sha256": "0" * 64, "scope": "admin", "label": ""}
    asyncio.run(filled(path))
    asyncio.run(with_key(lambda store: store.run(stored_keys.create, **create)))
    shutil.copy(path, backup)
    assert asyncio.run(with_key(lambda store: store.run(stored_keys.revoke, "k1")))
    copy = head_of(path)
    assert verified(path, copy) == []
    for table in ("keys", "roster"):
        run_sql(path, f"delete from {table}")
        for row in run_sql(str(backup), f"select * from {table}"):
            values = ", ".join("null" if value is None else repr(value) for value in row)
            run_sql(path, f"insert into {table} values ({values})")
    assert verified(path) == [], "an earlier state of both is a consistent one"
    assert verified(path, copy) == ["key k1: it is an earlier one than in the copy of the head"]
    run_sql(path, "delete from keys")
    assert "key k1: it was removed; the copy of the head has it" in verified(path, copy)
