import asyncio
import json
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage.errors import (
    DeadlineError,
    OtherModelError,
    ReplyError,
    ScorerError,
    StoreError,
    UpstreamError,
)
from conformal_arbitrage.models import Answer, Cache, ChatAnswerer, Settings
from conformal_arbitrage.models.endpoint import LARGEST_STREAM, Assembly, Endpoint, events
from conformal_arbitrage.models.port import Call, Reply, Wrapper
from conformal_arbitrage.models.resilience import Limit, RateLimit, Retry
from conformal_arbitrage.types import ChatRequest, Spent
from tests.scripted import Stream, Upstream, chunk, completion, ending, sse
from tests.sockets import Sockets

MESSAGES = [{"role": "user", "content": "Say it."}]
UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
SECRET = "sk-proj-AbC123/def+GHI456=="
ROLE, ONE, TWO = chunk({"role": "assistant", "content": ""}), chunk({"content": "one "}), chunk({"content": "two"})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def in_portions(data, cuts):
    ends = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


def fed(*given):
    async def run():
        return [data async for data in events(portions(*given))]

    return asyncio.run(run())


def assembled(*chunks):
    whole = Assembly()
    for one in chunks:
        whole.add(one)
    return whole.document()


def message(*chunks):
    return assembled(*chunks)["choices"][0]["message"]


async def portions(*given):
    """Yield what a server sends, portion by portion; a number is a pause."""
    for one in given:
        if isinstance(one, bytes):
            yield one
        await asyncio.sleep(0 if isinstance(one, bytes) else one)


def streams(*given, **rest):
    """A server that streams these replies in turn, and the last one from then on."""
    replies = given if given and isinstance(given[0], list) else [list(given)]
    return Upstream(lambda path, body, number: Stream(portions(*replies[min(number, len(replies) - 1)]), **rest))


async def streamed(port, call, passed, take=None):
    """Return the reply of a stream; its chunks go to `passed`, and to `take` one by one."""
    async with aclosing(port.stream(call)) as items:
        async for item in items:
            if isinstance(item, Reply):
                return item
            passed.append(item)
            if take is not None:
                await take(item)


def called(server, *, through=lambda port: port, take=None, **options):
    """Return the Reply of a streamed call or the error it raised, and the chunks it yielded."""
    passed = []

    async def run():
        async with server, Endpoint(server.url, **options) as endpoint:
            call = Call(path="/chat/completions", body={"model": "m", "messages": MESSAGES})
            try:
                return await streamed(through(endpoint), call, passed, take)
            except (ScorerError, StoreError) as error:
                return error

    return asyncio.run(run()), passed


def content_of(passed):
    deltas = [one["choices"][0]["delta"] for one in passed if one["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def error_of(result, kind=UpstreamError, *, retryable, spent=UNKNOWN):
    assert type(result) is kind, repr(result)
    assert (result.retryable, result.spent) == (retryable, spent)
    assert "\n" not in str(result)
    assert len(str(result)) < 500
    return result


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
BLOCKS = st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["", ": hello", "event: x", "id: 7", ":"]))


@given(st.lists(BLOCKS, max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.data())
def test_events_do_not_depend_on_how_the_bytes_are_split(blocks, newline, spaced, data):
    colon = "data: " if spaced else "data:"
    texts = [[*([extra] if extra else []), *(colon + line for line in lines), ""] for lines, extra in blocks]
    whole = "".join(line + newline for lines in texts for line in lines).encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=12))
    bare = [[line if spaced else line.removeprefix(" ") for line in lines] for lines, _ in blocks]
    assert fed(*in_portions(whole, cuts)) == ["\n".join(lines).encode() for lines in bare]


def test_events_can_be_read_byte_by_byte():
    whole = b": hello\r\n\r\nevent: m\r\ndata: {\r\ndata: }\r\n\r\n\r\ndata:[DONE]\n\n"
    assert fed(*(bytes([byte]) for byte in whole)) == fed(whole) == [b"{\n}", b"[DONE]"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r"])
def test_an_event_without_its_blank_line_is_incomplete(end):
    assert fed(b"data: 1\n\n", b"data: 2" + end) == [b"1"]


def test_lines_other_than_data_make_no_event():
    assert fed(b": waiting\n\n", b"event: ping\nid: 3\nretry: 5\n\n", b"\n\n\r\n", b"database: 5\n\n") == []


def test_texts_are_appended():
    tokens = {"prompt_tokens": 10, "completion_tokens": 5}
    end = {**chunk(None), "usage": tokens}
    completion = assembled(ROLE, ONE, TWO, chunk({}, finish="length"), end)
    assert completion["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one two"},
        "finish_reason": "length",
        "logprobs": None,
    }
    assert (completion["object"], completion["model"], completion["id"], completion["usage"]) == (
        "chat.completion", "m", "chatcmpl-1", tokens,
    )  # fmt: skip


def call_part(place, **fields):
    return chunk({"tool_calls": [{"index": place, **fields}]})


def parts_of(calls, sizes):
    """Split parallel tool calls as endpoints stream them: the start of each, then their arguments in turns."""
    parts = []
    for place, call in enumerate(calls):
        begins = {"name": call["function"]["name"], "arguments": ""}
        parts.append(call_part(place, id=call["id"], type="function", function=begins))
    left = [call["function"]["arguments"] for call in calls]
    while any(left):
        for place, text in enumerate(left):
            size = sizes[place % len(sizes)]
            parts += [call_part(place, function={"arguments": text[:size]})] if text else []
            left[place] = text[size:]
    return parts


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3).map(json.dumps)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), min_size=1, max_size=3)


@given(CALLS, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([None, "I look."]))
def test_fragments_of_tool_calls_are_assembled_as_in_a_whole_completion(named, sizes, said):
    calls = [
        {"id": f"call-{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(named)
    ]
    begin = chunk({"role": "assistant", "content": said})
    tokens = {**chunk(None), "usage": completion(said)["usage"]}
    whole = assembled(begin, *parts_of(calls, sizes), chunk({}, finish="tool_calls"), tokens)
    assert whole == completion(said, tool_calls=calls, finish="tool_calls")


def test_tool_calls_without_an_index_are_separate_calls():
    whole = [{"id": f"c{k}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for k in range(2)]
    assert message(chunk({"tool_calls": whole[:1]}), chunk({"tool_calls": whole[1:]}))["tool_calls"] == whole


def test_null_fields_of_later_parts_of_a_call_are_ignored():
    begin = call_part(0, id="c", type="function", function={"name": "look", "arguments": '{"k"'})
    rest = call_part(0, id=None, type=None, function={"name": None, "arguments": ":1}"})
    function = {"name": "look", "arguments": '{"k":1}'}
    assert message(begin, rest)["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


def test_blank_fields_of_later_chunks_are_ignored():
    completion = assembled(ONE, {**chunk({}), "id": "", "model": "", "object": "", "created": 0})
    assert (completion["id"], completion["model"]) == ("chatcmpl-1", "m")


def test_reasoning_and_refusals_are_appended_and_other_fields_overwritten():
    reply = message(
        chunk({"reasoning_content": "since ", "refusal": None, "annotations": [1]}),
        chunk({"reasoning_content": "so", "refusal": "I ", "annotations": [1, 2]}),
        chunk({"refusal": "will not", "content": None, "annotations": None}),
    )
    assert reply == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "since so",
        "refusal": "I will not",
        "annotations": [1, 2],
    }


@pytest.mark.parametrize(
    "choices", [[], [None], ["x"], [{}], [{"delta": None}], [{"delta": [1]}], [{"delta": {"tool_calls": {"a": 1}}}]]
)
def test_a_malformed_chunk_adds_nothing(choices):
    assert message(ONE, {**TWO, "choices": choices}, TWO) == {"role": "assistant", "content": "one two"}


@pytest.mark.parametrize(
    "deltas",
    [
        [{"content": [{"type": "text", "text": "x"}]}, {"content": "y"}],
        [{"content": 5}, {"content": "y"}],
        [{"tool_calls": [{"index": 0, "function": "f"}]}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}],
        [{"tool_calls": [{"index": 0, "function": {"arguments": {}}}]}] * 2,
        [{"tool_calls": [{"index": 0, "function": {"arguments": {}}}]}, call_part(0, function={"arguments": "{"})],
        [{"tool_calls": ["f", None, 3]}],
    ],
    ids=str,
)
def test_parts_that_do_not_fit_together_do_not_crash(deltas):
    result, _ = called(streams(sse(*(delta if "choices" in delta else chunk(delta) for delta in deltas)), ending()))
    assert isinstance(result, Reply), result


def test_the_request_asks_for_a_stream_with_usage_and_is_otherwise_unchanged():
    server = streams(sse(ROLE, ONE), ending())
    called(server)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies == [{"model": "m", "messages": MESSAGES, **more}]


def test_a_stream_ends_with_the_same_reply_as_a_plain_call():
    result, passed = called(streams(sse(ROLE, ONE, TWO), ending(usage=(11, 7))))
    plain, none = called(Upstream(lambda *_: completion("one two", usage=(11, 7))))
    assert (result.document, result.spent) == (plain.document, plain.spent)
    assert result.spent == Spent(calls=1, input_tokens=11, output_tokens=7, cost=None)
    assert content_of(passed) == "one two"
    assert none == []  # a server that does not stream is read as ever


def test_a_chunk_is_yielded_before_the_next_one_arrives():
    seen = asyncio.Event()

    async def take(_):
        seen.set()

    async def waits(*_):
        yield sse(ONE)
        async with asyncio.timeout(60):
            await seen.wait()
        yield sse(TWO) + ending()

    result, _ = called(Upstream(lambda *_: Stream(waits())), take=take)
    assert result.document["choices"][0]["message"]["content"] == "one two"


def test_nothing_is_read_while_the_consumer_handles_a_chunk():
    order = []

    async def take(one):
        order.append("begin")
        await asyncio.sleep(0.01)
        order.append("end")

    called(streams(sse(ONE, TWO), ending()), take=take)
    assert order == ["begin", "end"] * 4


def test_a_stream_without_usage_has_unknown_tokens():
    result, _ = called(streams(sse(ONE, chunk({}, finish="stop"), "[DONE]")))
    assert result.spent == UNKNOWN


def test_a_stream_with_a_finish_reason_needs_no_done():
    result, _ = called(streams(sse(ONE, chunk({}, finish="stop"))))
    assert result.document["choices"][0]["finish_reason"] == "stop"


def test_a_blank_finish_reason_does_not_end_a_stream():
    result, _ = called(streams(sse(chunk({"content": "one "}, finish=""))))
    assert "broke off" in str(error_of(result, retryable=False))


def test_a_connection_that_breaks_after_done_does_no_harm():
    result, _ = called(streams(sse(ONE) + ending(), 0.05, cut=True))
    assert isinstance(result, Reply), result


def test_a_server_that_keeps_the_connection_open_after_done_is_not_waited_for():
    result, _ = called(streams(sse(ONE) + ending(), 5.0), timeout=2.0)
    assert isinstance(result, Reply), result


def test_the_connection_of_a_finished_stream_is_reused():
    lines = []

    async def reply(peer, *_):
        lines.append(peer._writer)
        data = sse(ONE) + ending()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await peer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await asyncio.sleep(0.01)
        await peer.write(b"0\r\n\r\n")

    class Twice(Wrapper):
        async def stream(self, call):
            await streamed(self.port, call, [])
            yield await streamed(self.port, call, [])

    result, _ = called(Sockets(reply), through=Twice)
    assert isinstance(result, Reply), result
    assert len(lines) == 2
    assert lines[0] is lines[1]


ERROR = {"error": {"message": "out of memory", "code": 500}}
FAULTS = {
    "an error": sse(ERROR),
    "an error in words": sse({"error": "out of memory"}),
    "an error beside choices": sse({**chunk({"content": ""}, finish="error"), **ERROR}),
    "no JSON": sse("{"),
    "no chunk": sse([1]),
    "no choices": sse({"choices": None}),
    "no end": b"",
    "an event cut short": b'data: {"choices": [',
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_stream_is_retryable_only_before_the_first_chunk(fault, begun):
    result, passed = called(streams(sse(ONE) if begun else b"", fault))
    error_of(result, retryable=not begun)
    assert passed == ([ONE] if begun else [])


def test_the_message_of_an_error_in_a_stream_is_kept():
    for fault in ("an error", "an error in words", "an error beside choices"):
        assert "out of memory" in str(called(streams(FAULTS[fault]))[0])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_broken_connection_is_retryable_only_before_the_first_chunk(how, begun):
    async def reply(peer, *_):
        whole = sse(ONE) if begun else b": hello\n\n"
        head = HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked")
        await peer.write(head + b"%x\r\n%s\r\n" % (len(whole), whole))
        await asyncio.sleep(0.05)
        getattr(peer, how)()

    result, passed = called(Sockets(reply))
    error_of(result, retryable=not begun)
    assert passed == ([ONE] if begun else [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_halts_ends_at_the_timeout(begun):
    result, passed = called(streams(sse(ONE) if begun else b": hello\n\n", 5.0, ending()), timeout=0.3)
    error_of(result, DeadlineError, retryable=not begun)
    assert passed == ([ONE] if begun else [])


def test_a_stream_that_never_pauses_for_long_ends_at_the_timeout_too():
    result, passed = called(streams(*[sse(ONE), 0.05] * 100), timeout=0.3)
    error_of(result, DeadlineError, retryable=False)
    assert passed


def test_a_stream_past_the_largest_one_is_refused_for_good():
    big = sse(chunk({"content": "x" * 2**20}))
    result, passed = called(streams(*[big] * 33, ending()))
    assert "larger than 32 MB" in str(error_of(result, retryable=False))
    assert len(content_of(passed)) < LARGEST_STREAM


def test_comments_count_towards_the_largest_stream():
    result, _ = called(streams(*[b": " + b"x" * 2**20 + b"\n"] * 33, sse(ONE), ending()))
    error_of(result, retryable=False)


def test_a_stream_just_below_the_largest_one_is_read():
    big = sse(chunk({"content": "x" * 2**20}))
    result, _ = called(streams(*[big] * 31, ending()))
    assert len(result.document["choices"][0]["message"]["content"]) == 31 * 2**20


def test_a_refused_stream_is_an_ordinary_refusal():
    result, passed = called(Upstream(lambda *_: (429, {"error": {"message": "slow down"}})))
    assert (result.status, result.retryable, passed) == (429, True, [])


def patient(port):
    return Retry(port, attempts=3, pause=0.001)


def test_a_stream_is_retried_until_its_first_chunk():
    server = streams([sse(ERROR)], [b": hello\n\n"], [sse(ROLE, ONE), ending()])
    result, passed = called(server, through=patient)
    assert result.document["choices"][0]["message"]["content"] == content_of(passed) == "one "
    assert len(server.bodies) == 3
    assert result.spent.calls == 3


def test_a_stream_that_has_begun_is_never_retried():
    for fault in FAULTS.values():
        server = streams([sse(ROLE), fault], [sse(ROLE, ONE), ending()])
        result, passed = called(server, through=patient)
        error_of(result, retryable=False)
        assert passed == [ROLE]
        assert len(server.bodies) == 1


def test_an_error_in_the_consumer_is_not_retried():
    async def take(_):
        raise StoreError("the disk is full")

    server = streams(sse(ONE, TWO), ending())
    result, _ = called(server, through=patient, take=take)
    assert type(result) is StoreError
    assert len(server.bodies) == 1


async def test_closing_a_stream_closes_its_connection():
    left = asyncio.Event()

    async def reply(peer, *_):
        await peer.write(HEAD + sse(ONE))
        try:
            await peer.gone()
        finally:
            left.set()

    async with Sockets(reply) as server, Endpoint(server.url) as endpoint:
        items = endpoint.stream(Call(path="/x", body={}))
        assert await anext(items) == ONE
        await items.aclose()
        await asyncio.wait_for(left.wait(), 10)
    assert left.is_set()


ECHOES = {
    "plain": json.dumps(chunk({"content": f"it is {SECRET}"})),
    "escaped slashes": json.dumps(chunk({"content": f"it is {SECRET}"})).replace("/", "\\/"),
    "unicode escapes": json.dumps(chunk({"content": "KEY"})).replace(
        "KEY", "".join(f"\\u{ord(c):04x}" for c in SECRET)
    ),
    "an error": json.dumps({"error": {"message": f"wrong key {SECRET}"}}),
    "no JSON": f"wrong key {SECRET}",
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
def test_a_key_echoed_in_a_stream_shows_up_nowhere(echo):
    result, passed = called(streams(sse(ONE, echo), ending()), key=SECRET)
    shown = json.dumps([passed, result.document if isinstance(result, Reply) else str(result)])
    assert "***" in shown
    assert "AbC123" not in shown


async def test_a_stored_reply_is_not_streamed_and_one_that_was_streamed_is_stored(tmp_path):
    async with streams(sse(ROLE, ONE), ending()) as server, Endpoint(server.url) as endpoint:
        cache, passed = Cache(endpoint, tmp_path / "replies.sqlite"), []
        try:
            replies = [await streamed(cache, Call(path="/x", body={}), passed) for _ in range(2)]
        finally:
            cache.close()
        (first, second), calls = replies, len(server.bodies)
    assert first.document == second.document
    assert (content_of(passed), calls) == ("one ", 1)


def answered(server, **settings):
    """Return a streamed answer, or the error in its place, and the chunks that were yielded."""
    passed = []

    async def run():
        async with server, Endpoint(server.url) as endpoint:
            answerer = ChatAnswerer(port=endpoint, settings=Settings(model="m", **settings))
            try:
                async with aclosing(answerer.stream(ChatRequest({"messages": MESSAGES}))) as items:
                    async for item in items:
                        if isinstance(item, Answer):
                            return item
                        passed.append(item)
            except ScorerError as error:
                return error

    return asyncio.run(run()), passed


def test_a_streamed_answer_is_whole():
    result, passed = answered(streams(sse(ROLE, ONE, TWO), ending(model="m-1")), served=None)
    assert result.message == {"role": "assistant", "content": "one two"}
    assert (result.served, content_of(passed)) == ("m-1", "one two")


def test_a_chunk_of_another_model_than_the_pinned_one_is_not_yielded():
    other = chunk({"content": "two"}, model="m-2")
    for first, expected in ((other, []), (ONE, [ONE])):
        result, passed = answered(streams(sse(first, other), ending()), served="m")
        assert type(result) is OtherModelError
        assert "'m-2'" in str(result)
        assert passed == expected
        assert result.spent == UNKNOWN


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_a_chunk_with_text_but_no_model_is_not_from_the_pinned_one(named):
    nameless = {name: value for name, value in ONE.items() if name != "model"} | named
    result, passed = answered(streams(sse(nameless), ending()), served="m")
    assert type(result) is OtherModelError
    assert passed == []


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_an_empty_chunk_may_omit_the_model(named):
    filtered = {"id": "", "object": "", "created": 0, "choices": [], "prompt_filter_results": [], **named}
    result, passed = answered(streams(sse(filtered, ROLE, ONE), ending()), served="m")
    assert result.message["content"] == content_of(passed) == "one "


@pytest.mark.parametrize("deltas", [[], [{"content": " "}, {"content": "\n"}], [{"refusal": "no"}]], ids=str)
def test_a_stream_without_an_answer_is_an_error_of_the_reply(deltas):
    result, _ = answered(streams(sse(ROLE, *map(chunk, deltas)), ending()))
    assert isinstance(result, ReplyError)
    assert (result.spent.input_tokens, result.spent.output_tokens) == (10, 5)


async def test_a_streamed_answer_frees_its_slot_before_the_call_that_rates_it():
    replies = [Stream(portions(sse(ROLE, ONE), ending())), completion('{"confidence": 0.8}')]
    async with Upstream(lambda path, body, number: replies[number]) as server, Endpoint(server.url) as endpoint:
        port = Limit(endpoint, RateLimit(concurrency=1))
        answerer = ChatAnswerer(port=port, settings=Settings(model="m"), confidence="ask")
        async with asyncio.timeout(60), aclosing(answerer.stream(ChatRequest({"messages": MESSAGES}))) as items:
            answer = [item async for item in items][-1]
    assert (answer.confidence, answer.spent.calls) == (0.8, 2)
