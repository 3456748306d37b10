"""Callers of people with OpenAI's own client, as an application has it: held, refused, retried, streamed, interrupted."""

import asyncio
import json
from contextlib import contextmanager, suppress

import openai
import pytest

from conformal_arbitrage.store import reviews
from tests.gateway.house import DECISION, MENU, UNSURE, until, votes
from tests.gateway.people import LONG, TEAM, Later, PeopleHouse

BRIEF = {"wait": 1.0}


@pytest.fixture
def crew(house):
    """A gateway with an unsure Primary, and a reviewer of it."""

    def start(**options):
        one = house(PeopleHouse, **{"primary": votes(*UNSURE), **options})
        one.headers = one.keyed("call")
        return one, one.reviewer("ann")

    return start


class Caller:
    """An application with OpenAI's client; `statuses` are those of all its requests, by the client itself or not."""

    def __init__(self, house, transport, **options):
        self.statuses = []
        transport.event_hooks["response"].append(lambda reply: self.statuses.append(reply.status_code))
        key = house.headers["Authorization"].removeprefix("Bearer ")
        self.client = openai.OpenAI(base_url=f"{house.url}/v1", api_key=key, http_client=transport, **options)

    def chat(self, key=None, text="Say it.", **options):
        headers = {} if key is None else {"Idempotency-Key": key}
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(
            model="support", messages=messages, extra_body={"arbitrage": MENU["arbitrage"]}, extra_headers=headers, **options
        )  # fmt: skip

    def refusal(self, kind, *arguments, **options):
        with pytest.raises(kind) as refused:
            self.chat(*arguments, **options)
        return refused.value

    def later(self, *arguments, **options):
        return Later(lambda: self.chat(*arguments, **options))


@contextmanager
def caller(house, **options):
    with openai.DefaultHttpxClient(timeout=120) as transport:
        yield Caller(house, transport, **options)


def ask_patiently(house, key):
    """What a client says that comes back until people have decided."""
    with caller(house, max_retries=30) as one:
        return said(one.chat(key))


def said(completion):
    return completion.choices[0].message.content, completion.arbitrage["decided_by"]


def in_queue(house):
    return house.with_store(lambda store: store.run(reviews.backlogs, {TEAM: ()}))[0].open


def answer_quickly(house, ann):
    """Let someone answer a question, so that callers are told to come back after a second."""
    call = Later(lambda: house.decide({**DECISION, "input": "An easy one."}))
    ann.decide(0)
    until(lambda: in_queue(house) == 0, LONG)
    call.result()


def test_a_client_with_nothing_changed_is_held_until_people_have_decided(crew):
    house, ann = crew()
    with caller(house) as one:
        call = one.later()
        ann.decide(1)
        assert said(call.result()) == ("b", "guardian")
        assert one.statuses == [200]


def test_two_clients_with_one_key_join_one_review(crew):
    house, ann = crew()
    with caller(house) as one, caller(house) as other:
        calls = [one.later("k"), other.later("k")]
        ann.decide(2)
        first, second = (call.result() for call in calls)
        assert first.model_dump() == second.model_dump() == one.chat("k").model_dump()
        assert said(first) == ("c", "guardian")
    assert len(house.primary.bodies) == len(house.records()) == 1
    assert ann.claim() is None


def test_with_a_key_a_client_that_does_not_retry_is_told_to(crew):
    house, ann = crew(review=BRIEF)
    with caller(house, max_retries=0) as one:
        pending = one.refusal(openai.ConflictError, "k")
        assert (pending.code, one.statuses) == ("review_pending", [409])
        headers = pending.response.headers
        assert headers["x-should-retry"] == "true"
        assert 1 <= int(headers["retry-after"]) <= 30
        ann.decide(1)
        polled = one.client.get(f"{headers['location'].removeprefix('/v1')}?wait=50", cast_to=object)
    assert polled["status"] == "decided"
    assert ask_patiently(house, "k")[0] == polled["reply"]["choices"][0]["message"]["content"] == "b"


def test_without_a_key_the_default_client_does_not_ask_people_again_and_again(crew):
    house, ann = crew(review=BRIEF)
    with caller(house) as one:
        pending = one.refusal(openai.ConflictError)
        assert (pending.code, one.statuses) == ("review_pending", [409])
        assert pending.response.headers["x-should-retry"] == "false"
        assert in_queue(house) == 1
        ann.decide(0)
    assert ask_patiently(house, f"review:{pending.response.headers['x-arbitrage-decision-id']}") == ("a", "guardian")
    assert len(house.records()) == 1


def test_with_a_key_the_default_client_comes_back_twice(crew):
    house, ann = crew(review=BRIEF)
    answer_quickly(house, ann)
    with caller(house) as one:
        assert one.refusal(openai.ConflictError, "k").code == "review_pending"
        assert one.statuses == [409] * (1 + openai.DEFAULT_MAX_RETRIES) == [409] * 3
        assert in_queue(house) == 1
    ann.decide(1)
    assert ask_patiently(house, "k") == ("b", "guardian")
    assert len(house.primary.bodies) == len(house.records()) == 2


def test_a_stream_is_refused_before_it_begins_and_comes_whole_with_the_decision(crew):
    house, ann = crew(review=BRIEF)
    answer_quickly(house, ann)
    with caller(house, max_retries=30) as one:
        call = one.later("k", stream=True)
        until(lambda: one.statuses, LONG)
        ann.decide(1)
        with call.result() as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == "b"
        assert (one.statuses[0], one.statuses[-1]) == (409, 200)


def test_of_three_questions_one_goes_to_people_and_the_client_gets_all(crew):
    def reply(path, body, number):
        return votes(*((0.9, 0.1) if "sure" in json.dumps(body) else UNSURE))(path, body, number)

    house, ann = crew(primary=reply)
    question = DECISION["questions"][0]
    body = {**DECISION, "questions": [{**question, "instructions": text} for text in ("sure 1", "doubt", "sure 2")]}
    with caller(house) as one:
        call = Later(lambda: one.client.post("/decisions", body=body, cast_to=object))
        assert "doubt" in ann.decide(2)["context"]
        answers = call.result()["answers"]
        assert [(answer["choice"], answer["arbitrage"]["decided_by"]) for answer in answers] == [
            ("a", "primary"), ("c", "guardian"), ("a", "primary"),
        ]  # fmt: skip
    assert len(house.primary.bodies) == len(house.records()) == 3


def leave(house, key=None):
    """An application whose task is cancelled while people decide."""

    async def story():
        async with openai.AsyncOpenAI(
            base_url=f"{house.url}/v1", api_key=house.headers["Authorization"].removeprefix("Bearer "), timeout=120
        ) as client:
            headers = {} if key is None else {"Idempotency-Key": key}
            asking = client.chat.completions.create(
                model="support", messages=MENU["messages"], extra_body={"arbitrage": MENU["arbitrage"]},
                extra_headers=headers,
            )  # fmt: skip
            call = asyncio.create_task(asking)
            await asyncio.to_thread(until, lambda: in_queue(house) == 1, LONG)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call

    asyncio.run(story())


def test_a_client_that_leaves_takes_its_question_along_unless_it_has_a_key(crew):
    house, ann = crew()
    leave(house)
    until(lambda: in_queue(house) == 0, LONG)
    assert ann.claim() is None
    leave(house, "k")
    ann.decide(1)
    assert ask_patiently(house, "k") == ("b", "guardian")
    assert ann.claim() is None


def test_a_client_outlives_a_restart_of_the_gateway(crew):
    house, ann = crew()
    with caller(house, max_retries=30) as one:
        call = one.later("k")
        held = ann.wait()
        house.restart_on_its_port()
        assert not call.done
        assert ann.vote(held, 2).status_code == 200
        assert said(call.result()) == ("c", "guardian")
    assert len(house.primary.bodies) == len(house.records()) == 1


def test_a_key_with_another_body_is_refused_once(crew):
    house, ann = crew(review=BRIEF)
    with caller(house) as one, caller(house, max_retries=0) as first:
        first.refusal(openai.ConflictError, "k")
        refused = one.refusal(openai.UnprocessableEntityError, "k", "Another.")
        assert (refused.code, one.statuses) == ("idempotency_key_reused", [422])
    assert in_queue(house) == 1
    assert "Say it." in ann.wait()["context"]


def test_if_nobody_is_there_the_safe_action_comes_at_once(crew):
    house, _ = crew(review={"wait": 55.0, "late": "fallback"}, task={"safe_action": "c"})
    with caller(house) as one:
        completion = one.chat(timeout=50.0)  # before anybody could have been waited for
        assert said(completion) == ("c", "fallback")
        assert completion.arbitrage["guarantee"] == "none"
        assert one.statuses == [200]
    assert in_queue(house) == 0
