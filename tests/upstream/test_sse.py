import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage.errors import DeadlineError, ReplyError, ScorerError, StoreError, UpstreamError
from conformal_arbitrage.scorers import Cache, ChatAnswerer, Settings
from conformal_arbitrage.types import ChatRequest, Spent
from conformal_arbitrage.upstream.base import Call, Reply
from conformal_arbitrage.upstream.endpoint import LARGEST_STREAM, Endpoint
from conformal_arbitrage.upstream.sse import Assembly, Events
from conformal_arbitrage.upstream.wrappers import Retry
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


def fed(*portions):
    events = Events()
    return [data for portion in portions for data in events.feed(portion)]


def assembled(*chunks):
    whole = Assembly()
    for one in chunks:
        whole.add(one)
    return whole.document()


def message(*chunks):
    return assembled(*chunks)["choices"][0]["message"]


async def portions(*given):
    """What a server sends, portion by portion; a number is a pause."""
    for one in given:
        if isinstance(one, bytes):
            yield one
        await asyncio.sleep(0 if isinstance(one, bytes) else one)


def streams(*given, **rest):
    """A server that streams, one reply after the other as it is asked; the last one from then on."""
    replies = given if given and isinstance(given[0], list) else [list(given)]
    return Upstream(lambda path, body, number: Stream(portions(*replies[min(number, len(replies) - 1)]), **rest))


def called(server, *, through=lambda port: port, sink=None, **options):
    """What a call with a sink comes to, a Reply or the error it raised, and the chunks that were passed on."""
    passed = []

    async def keep(one):
        passed.append(one)

    async def run():
        async with server, Endpoint(server.url, **options) as endpoint:
            call = Call(path="/chat/completions", body={"model": "m", "messages": MESSAGES}, sink=sink or keep)
            try:
                return await through(endpoint).call(call)
            except (ScorerError, StoreError) as error:
                return error

    return asyncio.run(run()), passed


def content_of(passed):
    deltas = [one["choices"][0]["delta"] for one in passed if one["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def error_of(found, kind=UpstreamError, *, retryable, spent=UNKNOWN):
    assert type(found) is kind, repr(found)
    assert (found.retryable, found.spent) == (retryable, spent)
    assert "\n" not in str(found)
    assert len(str(found)) < 500
    return found


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
BLOCKS = st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["", ": hello", "event: x", "id: 7", ":"]))


@given(st.lists(BLOCKS, max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.data())
def test_events_are_the_same_in_whatever_portions_the_bytes_come(blocks, newline, spaced, data):
    colon = "data: " if spaced else "data:"
    texts = [[*([extra] if extra else []), *(colon + line for line in lines), ""] for lines, extra in blocks]
    whole = "".join(line + newline for lines in texts for line in lines).encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=12))
    bare = [[line if spaced else line.removeprefix(" ") for line in lines] for lines, _ in blocks]
    assert fed(*in_portions(whole, cuts)) == ["\n".join(lines).encode() for lines in bare]


def test_events_that_come_byte_by_byte_are_read():
    whole = b": hello\r\n\r\nevent: m\r\ndata: {\r\ndata: }\r\n\r\n\r\ndata:[DONE]\n\n"
    assert fed(*(bytes([byte]) for byte in whole)) == fed(whole) == [b"{\n}", b"[DONE]"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r"])
def test_an_event_whose_blank_line_is_missing_has_not_come(end):
    assert fed(b"data: 1\n\n", b"data: 2" + end) == [b"1"]


def test_what_is_no_data_makes_no_event():
    assert fed(b": waiting\n\n", b"event: ping\nid: 3\nretry: 5\n\n", b"\n\n\r\n", b"database: 5\n\n") == []


def test_a_text_in_parts_is_the_text():
    tokens = {"prompt_tokens": 10, "completion_tokens": 5}
    end = {**chunk(None), "usage": tokens}
    found = assembled(ROLE, ONE, TWO, chunk({}, finish="length"), end)
    assert found["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one two"},
        "finish_reason": "length",
        "logprobs": None,
    }
    assert (found["object"], found["model"], found["id"], found["usage"]) == (
        "chat.completion", "m", "chatcmpl-1", tokens,
    )  # fmt: skip


def call_part(place, **told):
    return chunk({"tool_calls": [{"index": place, **told}]})


def parts_of(calls, sizes):
    """Parallel tool calls as endpoints stream them: a beginning each, then their arguments in turns."""
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
def test_tool_calls_in_fragments_are_those_of_a_whole_completion(named, sizes, said):
    calls = [
        {"id": f"call-{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(named)
    ]
    begin = chunk({"role": "assistant", "content": said})
    tokens = {**chunk(None), "usage": completion(said)["usage"]}
    found = assembled(begin, *parts_of(calls, sizes), chunk({}, finish="tool_calls"), tokens)
    assert found == completion(said, tool_calls=calls, finish="tool_calls")


def test_calls_without_a_place_are_calls_of_their_own():
    whole = [{"id": f"c{k}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for k in range(2)]
    assert message(chunk({"tool_calls": whole[:1]}), chunk({"tool_calls": whole[1:]}))["tool_calls"] == whole


def test_what_is_null_in_a_later_part_of_a_call_stays_as_it_was():
    begin = call_part(0, id="c", type="function", function={"name": "look", "arguments": '{"k"'})
    rest = call_part(0, id=None, type=None, function={"name": None, "arguments": ":1}"})
    function = {"name": "look", "arguments": '{"k":1}'}
    assert message(begin, rest)["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


def test_what_is_blank_in_a_later_chunk_stays_as_it_was():
    found = assembled(ONE, {**chunk({}), "id": "", "model": "", "object": "", "created": 0})
    assert (found["id"], found["model"]) == ("chatcmpl-1", "m")


def test_reasoning_and_refusals_grow_and_of_all_else_the_last_counts():
    found = message(
        chunk({"reasoning_content": "since ", "refusal": None, "annotations": [1]}),
        chunk({"reasoning_content": "so", "refusal": "I ", "annotations": [1, 2]}),
        chunk({"refusal": "will not", "content": None, "annotations": None}),
    )
    assert found == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "since so",
        "refusal": "I will not",
        "annotations": [1, 2],
    }


@pytest.mark.parametrize(
    "choices", [[], [None], ["x"], [{}], [{"delta": None}], [{"delta": [1]}], [{"delta": {"tool_calls": {"a": 1}}}]]
)
def test_a_chunk_of_an_odd_shape_adds_nothing(choices):
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
def test_parts_that_do_not_fit_together_are_no_crash(deltas):
    found, _ = called(streams(sse(*(delta if "choices" in delta else chunk(delta) for delta in deltas)), ending()))
    assert isinstance(found, Reply), found


def test_the_request_asks_for_a_stream_with_its_tokens_and_is_otherwise_as_it_was():
    server = streams(sse(ROLE, ONE), ending())
    called(server)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies == [{"model": "m", "messages": MESSAGES, **more}]


def test_a_stream_comes_to_the_same_reply_as_no_stream():
    found, passed = called(streams(sse(ROLE, ONE, TWO), ending(usage=(11, 7))))
    plain, none = called(Upstream(lambda *_: completion("one two", usage=(11, 7))))
    assert (found.document, found.spent) == (plain.document, plain.spent)
    assert found.spent == Spent(calls=1, input_tokens=11, output_tokens=7, cost=None)
    assert content_of(passed) == "one two"
    assert none == []  # a server that does not stream is read as ever


def test_a_chunk_is_passed_on_before_the_next_is_there():
    seen = asyncio.Event()

    async def sink(_):
        seen.set()

    async def waits(*_):
        yield sse(ONE)
        async with asyncio.timeout(10):
            await seen.wait()
        yield sse(TWO) + ending()

    found, _ = called(Upstream(lambda *_: Stream(waits())), sink=sink)
    assert found.document["choices"][0]["message"]["content"] == "one two"


def test_nothing_is_read_on_while_a_chunk_is_being_taken():
    order = []

    async def sink(one):
        order.append("begin")
        await asyncio.sleep(0.01)
        order.append("end")

    called(streams(sse(ONE, TWO), ending()), sink=sink)
    assert order == ["begin", "end"] * 4


def test_without_a_word_about_tokens_they_are_unknown():
    found, _ = called(streams(sse(ONE, chunk({}, finish="stop"), "[DONE]")))
    assert found.spent == UNKNOWN


def test_a_stream_is_whole_with_its_reason_and_needs_no_done():
    found, _ = called(streams(sse(ONE, chunk({}, finish="stop"))))
    assert found.document["choices"][0]["finish_reason"] == "stop"


def test_a_blank_is_no_reason_to_end():
    found, _ = called(streams(sse(chunk({"content": "one "}, finish=""))))
    assert "broke off" in str(error_of(found, retryable=False))


def test_a_line_that_breaks_after_done_does_no_harm():
    found, _ = called(streams(sse(ONE) + ending(), 0.05, cut=True))
    assert isinstance(found, Reply), found


def test_a_server_that_leaves_the_line_open_after_done_is_not_waited_for():
    found, _ = called(streams(sse(ONE) + ending(), 5.0), timeout=2.0)
    assert isinstance(found, Reply), found


def test_a_line_on_which_a_stream_ended_well_is_used_again():
    lines = []

    async def reply(peer, *_):
        lines.append(peer._writer)
        data = sse(ONE) + ending()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await peer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await asyncio.sleep(0.01)
        await peer.write(b"0\r\n\r\n")

    class Twice:
        def __init__(self, port):
            self.call = lambda call: self.both(port, call)

        async def both(self, port, call):
            await port.call(call)
            return await port.call(call)

    found, _ = called(Sockets(reply), through=Twice)
    assert isinstance(found, Reply), found
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
def test_a_stream_with_a_fault_may_be_asked_for_again_only_if_nothing_was_passed_on(fault, begun):
    found, passed = called(streams(sse(ONE) if begun else b"", fault))
    error_of(found, retryable=not begun)
    assert passed == ([ONE] if begun else [])


def test_the_words_of_an_error_in_a_stream_are_kept():
    for fault in ("an error", "an error in words", "an error beside choices"):
        assert "out of memory" in str(called(streams(FAULTS[fault]))[0])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_connection_that_breaks_is_a_fault_of_the_same_kind(how, begun):
    async def reply(peer, *_):
        whole = sse(ONE) if begun else b": hello\n\n"
        head = HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked")
        await peer.write(head + b"%x\r\n%s\r\n" % (len(whole), whole))
        await asyncio.sleep(0.05)
        getattr(peer, how)()

    found, passed = called(Sockets(reply))
    error_of(found, retryable=not begun)
    assert passed == ([ONE] if begun else [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_halts_ends_at_the_timeout(begun):
    found, passed = called(streams(sse(ONE) if begun else b": hello\n\n", 5.0, ending()), timeout=0.3)
    error_of(found, DeadlineError, retryable=not begun)
    assert passed == ([ONE] if begun else [])


def test_a_stream_that_never_pauses_for_long_ends_at_the_timeout_too():
    found, passed = called(streams(*[sse(ONE), 0.05] * 100), timeout=0.3)
    error_of(found, DeadlineError, retryable=False)
    assert passed


def test_a_stream_past_the_largest_one_is_refused_for_good():
    big = sse(chunk({"content": "x" * 2**20}))
    found, passed = called(streams(*[big] * 33, ending()))
    assert "larger than 32 MB" in str(error_of(found, retryable=False))
    assert len(content_of(passed)) < LARGEST_STREAM


def test_comments_count_towards_the_largest_stream():
    found, _ = called(streams(*[b": " + b"x" * 2**20 + b"\n"] * 33, sse(ONE), ending()))
    error_of(found, retryable=False)


def test_a_stream_just_below_the_largest_one_is_read():
    big = sse(chunk({"content": "x" * 2**20}))
    found, _ = called(streams(*[big] * 31, ending()))
    assert len(found.document["choices"][0]["message"]["content"]) == 31 * 2**20


def test_a_refused_request_is_an_ordinary_refusal():
    found, passed = called(Upstream(lambda *_: (429, {"error": {"message": "slow down"}})))
    assert (found.status, found.retryable, passed) == (429, True, [])


def patient(port):
    return Retry(port, attempts=3, pause=0.001)


def test_a_stream_is_asked_for_again_while_nothing_has_been_passed_on():
    server = streams([sse(ERROR)], [b": hello\n\n"], [sse(ROLE, ONE), ending()])
    found, passed = called(server, through=patient)
    assert found.document["choices"][0]["message"]["content"] == content_of(passed) == "one "
    assert len(server.bodies) == 3
    assert found.spent.calls == 3


def test_a_stream_that_has_begun_is_never_asked_for_again():
    for fault in FAULTS.values():
        server = streams([sse(ROLE), fault], [sse(ROLE, ONE), ending()])
        found, passed = called(server, through=patient)
        error_of(found, retryable=False)
        assert passed == [ROLE]
        assert len(server.bodies) == 1


def test_an_error_of_whoever_takes_the_chunks_is_theirs():
    async def sink(_):
        raise StoreError("the disk is full")

    server = streams(sse(ONE, TWO), ending())
    found, _ = called(server, through=patient, sink=sink)
    assert type(found) is StoreError
    assert len(server.bodies) == 1


def test_a_caller_who_gives_up_lets_the_server_go():
    left = asyncio.Event()

    async def reply(peer, *_):
        await peer.write(HEAD + sse(ONE))
        try:
            await peer.gone()
        finally:
            left.set()

    async def run():
        begun = asyncio.Event()

        async def sink(_):
            begun.set()

        async with Sockets(reply) as server, Endpoint(server.url) as endpoint:
            asking = asyncio.create_task(endpoint.call(Call(path="/x", body={}, sink=sink)))
            await asyncio.wait_for(begun.wait(), 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.wait_for(left.wait(), 10)

    asyncio.run(run())
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
def test_the_key_shows_up_nowhere_though_the_stream_echoes_it(echo):
    found, passed = called(streams(sse(ONE, echo), ending()), key=SECRET)
    shown = json.dumps([passed, found.document if isinstance(found, Reply) else str(found)])
    assert "***" in shown
    assert "AbC123" not in shown


def test_a_stored_reply_is_not_streamed_and_one_that_was_streamed_is_stored(tmp_path):
    async def run():
        async with streams(sse(ROLE, ONE), ending()) as server, Endpoint(server.url) as endpoint:
            cache, passed = Cache(endpoint, tmp_path / "replies.sqlite"), []

            async def sink(one):
                passed.append(one)

            try:
                found = [await cache.call(Call(path="/x", body={}, sink=sink)) for _ in range(2)]
            finally:
                cache.close()
            return found, passed, len(server.bodies)

    (first, second), passed, calls = asyncio.run(run())
    assert first.document == second.document
    assert (content_of(passed), calls) == ("one ", 1)


def answered(server, **settings):
    """What a streamed answer comes to, or the error in its place, and the chunks that were passed on."""
    passed = []

    async def sink(one):
        passed.append(one)

    async def run():
        async with server, Endpoint(server.url) as endpoint:
            answerer = ChatAnswerer(port=endpoint, settings=Settings(model="m", **settings))
            try:
                return await answerer.answer(ChatRequest({"messages": MESSAGES}, sink=sink))
            except ScorerError as error:
                return error

    return asyncio.run(run()), passed


def test_an_answer_is_whole_though_it_was_passed_on_in_parts():
    found, passed = answered(streams(sse(ROLE, ONE, TWO), ending(model="m-1")), served=None)
    assert found.message == {"role": "assistant", "content": "one two"}
    assert (found.served, content_of(passed)) == ("m-1", "one two")


def test_a_chunk_of_another_model_than_the_pinned_one_is_not_passed_on():
    other = chunk({"content": "two"}, model="m-2")
    for first, expected in ((other, []), (ONE, [ONE])):
        found, passed = answered(streams(sse(first, other), ending()), served="m")
        assert type(found) is ReplyError
        assert "'m-2'" in str(found)
        assert passed == expected
        assert found.spent == UNKNOWN


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_words_of_a_model_without_a_name_are_not_those_of_the_pinned_one(named):
    nameless = {name: value for name, value in ONE.items() if name != "model"} | named
    found, passed = answered(streams(sse(nameless), ending()), served="m")
    assert type(found) is ReplyError
    assert passed == []


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_a_chunk_that_says_nothing_may_leave_the_model_out(named):
    filtered = {"id": "", "object": "", "created": 0, "choices": [], "prompt_filter_results": [], **named}
    found, passed = answered(streams(sse(filtered, ROLE, ONE), ending()), served="m")
    assert found.message["content"] == content_of(passed) == "one "


@pytest.mark.parametrize("deltas", [[], [{"content": " "}, {"content": "\n"}], [{"refusal": "no"}]], ids=str)
def test_a_stream_without_an_answer_is_an_error_of_the_reply(deltas):
    found, _ = answered(streams(sse(ROLE, *map(chunk, deltas)), ending()))
    assert isinstance(found, ReplyError)
    assert (found.spent.input_tokens, found.spent.output_tokens) == (10, 5)
