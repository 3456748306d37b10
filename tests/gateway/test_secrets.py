"""Secrets and content: what must not be printed, stored or passed on is not."""

import asyncio
import json
import stat

import pytest
from click.testing import CliRunner

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import main
from conformal_arbitrage.errors import ConfigError, StoreError
from conformal_arbitrage.live.build import database_of, open_record
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.endpoint import SplitSecret
from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import SECRET, Gateway, run_sql, write_config
from tests.gateway.house import CHAT, DECISION, UNSURE, House, error_of, failing, says, until, votes

KEY = {"Idempotency-Key": "order-17"}
PASSWORD = "pa/ss@wo:rd?#1"


@pytest.mark.parametrize("password", ["pa/ss@word", "pass@word", "pa/ssword", PASSWORD])
def test_a_password_that_needs_quoting_is_never_printed(password):
    with pytest.raises(StoreError) as caught:
        asyncio.run(open_store(f"postgresql://user:{password}@127.0.0.1:1/base"))
    for part in ("pa", "ss", "word", "1/base"):
        assert part not in str(caught.value).replace("PASSWORD", "").replace("pass", "p").replace("pad", ""), part


def test_a_password_from_the_environment_is_quoted_where_it_needs_it(tmp_path, monkeypatch):
    from psycopg.conninfo import conninfo_to_dict

    path = write_config(tmp_path, "postgresql://user:{DATABASE_PASSWORD}@host:5432/base")
    for value, parsed in ((PASSWORD, PASSWORD), ("plain", "plain"), ("p%40ss", "p@ss")):
        monkeypatch.setenv("DATABASE_PASSWORD", value)
        parameters = conninfo_to_dict(database_of(read_config(path)))
        assert (parameters["password"], parameters["host"], parameters["dbname"]) == (parsed, "host", "base")


def test_an_upstream_cannot_forge_a_line_of_the_log(tmp_path):
    forged = '{"level":"info","message":"all is well"}'
    with House(tmp_path, primary=votes(*UNSURE), guardian=failing(400, f"bad\n{forged}\n\r{forged}")) as gateway:

        async def story():
            async with Gateway(gateway.path, ARBITRAGE_SECRET=ProjectSecret.find().keys[0].decode()) as other:
                import requests

                reply = await asyncio.to_thread(requests.post, f"{other.url}/v1/decisions", json=DECISION, timeout=30)
                assert reply.status_code == 502

        asyncio.run(story())
    lines = gateway.path.with_suffix(".log").read_text().splitlines()
    messages = [json.loads(line).get("message", "") for line in lines]
    assert any("UpstreamError: status 400" in message for message in messages)
    assert not any("all is well" in message for message in messages)


@pytest.mark.parametrize("content", ["off", "hashed", "full"])
def test_excerpts_in_errors_are_stored_only_with_full_content(where, tmp_path, monkeypatch, content):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    echo = failing(400, "cannot answer 'A letter.' SECRET-WORD")
    policy = {"content": content, "audit_rate": 1.0}
    with House(tmp_path, primary=votes(*UNSURE), guardian=echo, policy=policy, gateway={"database": where}) as gateway:
        error_of(gateway.decide(), 502)
        error_of(gateway.decide(headers=KEY), 502)
        until(lambda: any(record.audit for record in gateway.records()))
        texts = str(run_sql(where, "select body from events"))
        assert ("SECRET-WORD" in texts) == (content == "full")
        assert "UpstreamError: status 400" in texts if content != "full" else "status 400" in texts


def test_no_content_remains_with_content_off_but_replies_for_a_day(where, tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    options = {"form": "text", "primary": says("mine SECRET-WORD", 0.9), "policy": {"content": "off"}}
    with House(tmp_path, **options, gateway={"database": where}) as gateway:
        body = {**CHAT, "messages": [{"role": "user", "content": "SECRET-WORD"}]}
        first = gateway.chat(body, headers=KEY)
        assert gateway.chat(body, headers=KEY).content == first.content
        for table in ("events", "audits", "claims", "begun", "undelivered"):
            assert "SECRET-WORD" not in str(run_sql(where, f"select * from {table}"))
        gateway.with_store(lambda store: integrity.prune(store, before=0))
        assert run_sql(where, "select count(*) from replays") == [(1,)]
        run_sql(where, "update replays set expires = 1")
        gateway.with_store(lambda store: integrity.prune(store, before=0))
        assert run_sql(where, "select count(*) from replays") == [(0,)]


def test_the_database_file_is_readable_by_its_owner_only(house):
    gateway = house()
    gateway.decide()
    for file in gateway.folder.glob("arbitrage.sqlite*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name


@pytest.mark.parametrize("content", [b"", b"\n", b"short"])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.delenv("ARBITRAGE_SECRET", raising=False)
    path = write_config(tmp_path, "store.db")
    (tmp_path / "arbitrage.secret").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a secret has 16"):
        ProjectSecret.find()
    result = CliRunner().invoke(main, ["serve", "--config", str(path), "--port", "0"])
    assert result.exit_code == 2
    assert "a secret has 16" in result.output


def test_a_database_refuses_every_secret_but_the_one_it_was_made_with(where, tmp_path, monkeypatch):
    path = write_config(tmp_path, where)
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    needed = ProjectSecret.find().id

    def verified():
        return CliRunner().invoke(main, ["records", "verify", "--config", str(path)])

    asyncio.run(_opened(path))
    assert verified().exit_code == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    for given in ("another-secret-of-this-length", None):
        monkeypatch.delenv("ARBITRAGE_SECRET")
        if given:
            monkeypatch.setenv("ARBITRAGE_SECRET", given)
        for result in (verified(), CliRunner().invoke(main, ["serve", "--config", str(path), "--port", "0"])):
            assert result.exit_code == 2, result.output
            assert f"made with the secret of fingerprint {needed}" in result.output
        monkeypatch.setenv("ARBITRAGE_SECRET", "")
    assert not (tmp_path / "another").exists()
    monkeypatch.setenv("ARBITRAGE_SECRET", f"another-secret-of-this-length,{SECRET}")
    assert verified().exit_code == 0


async def _opened(path):
    store = await open_record(read_config(path))
    await store.close()


def delta(text=None, finish=None, **rest):
    return {
        "choices": [
            {"index": 0, "delta": {**({} if text is None else {"content": text}), **rest}, "finish_reason": finish}
        ]
    }


@pytest.mark.parametrize("parts", range(1, 13))
def test_a_key_in_pieces_is_kept_out_of_a_stream(parts):
    secret = "sk-abcdefgh-12345"
    whole = f"so s and sk-a {secret} the rest sk-ab"
    size = -(-len(whole) // parts)
    split = SplitSecret(secret)
    chunks = [split.scrub(delta(whole[k : k + size])) for k in range(0, len(whole), size)]
    chunks.append(split.scrub(delta(finish="stop")))
    assert split.rest() is None
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole.replace(secret, "***")


def test_a_key_in_pieces_is_kept_out_of_tool_calls_and_of_streams_without_an_end():
    def call(text, index=0):
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    split = SplitSecret("sk-abcdefgh")
    pieces = [split.scrub(delta(**call(text))) for text in ('{"a":"sk-abc', 'defgh","b":"sk', "-no")]
    pieces.append(split.scrub(delta(finish="tool_calls", **call("s"))))
    texts = [one["function"]["arguments"] for p in pieces for one in p["choices"][0]["delta"]["tool_calls"]]
    assert "".join(texts) == '{"a":"***","b":"sk-nos'
    split.scrub(delta("it is sk-", **call("sk", 1)))
    assert split.rest()["choices"][0]["delta"] == {"content": "sk-", **call("sk", 1)}
    assert split.scrub({"choices": []}) == {"choices": []}
    assert split.rest() is None


def test_a_key_that_an_endpoint_echoes_in_two_chunks_reaches_no_caller(house, monkeypatch):
    from tests.gateway.test_live_stream import STREAM, tells

    monkeypatch.setenv("GUARDIAN_KEY", "sk-abcdefgh-12345")
    gateway = house(
        form="text", primary=says("mine", 0.1), guardian=tells("my key is sk-abcd", "efgh-12345", ", well"),
        models={"guardian": {"key_env": "GUARDIAN_KEY"}},
    )  # fmt: skip
    reply = gateway.chat(STREAM)
    assert reply.status_code == 200
    assert "efgh" not in reply.text
    assert "sk-abcd" not in reply.text
    assert "***" in reply.text


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("[policies.support]", "audit_rate = 50", "audit_rate must be a share"),
        ("[policies.support]", "audit_rate = -1", "audit_rate must be a share"),
        ("[policies.support]", "audit_rate = nan", "audit_rate must be a share"),
        ("[gateway]", "port = 99999", "port must be from 0 to 65535"),
        ("[gateway]", "port = -1", "port must be from 0 to 65535"),
        ("[gateway]", "retain_days = 0", "retain_days must be above 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_line(tmp_path, section, line, message):
    path = write_config(tmp_path, "store.db")
    text = path.read_text().replace("audit_rate = 0.3\n", "").replace(f"{section}\n", f"{section}\n{line}\n")
    path.write_text(text)
    for command in (["serve"], ["records", "verify"]):
        result = CliRunner().invoke(main, [*command, "--config", str(path)])
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert f"line {text.splitlines().index(line) + 1}" in result.output
        assert isinstance(result.exception, SystemExit)
