import pytest

from tests.gateway.house import CHAT, DECISION, MENU, MESSAGES, QUESTION, UNSURE, chunks, error_of, failing, says, votes

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PATHS = [
    ("POST", "/v1/decisions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/arbitrage/records"),
    ("GET", "/v1/arbitrage/records/{id}"), ("POST", "/v1/arbitrage/records/{id}/feedback"),
    ("GET", "/v1/arbitrage/policies/{name}"), ("PUT", "/v1/arbitrage/policies/{name}"),
    ("POST", "/v1/arbitrage/policies/{name}/rollback"), ("GET", "/health/live"), ("GET", "/health/ready"),
]  # fmt: skip


def enum_format(name, *options):
    schema = {"type": "object", "properties": {name: {"enum": list(options)}}, "required": [name]}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_primary_that_leads_far_enough_decides_alone(house):
    gateway = house()
    reply = gateway.decide()
    [answer] = reply.json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("a", "primary")
    assert answer["probabilities"][0] == {"value": "a", "probability": 0.9}
    assert not gateway.guardian.bodies


def test_an_answer_says_what_was_decided_how_and_by_whom(house):
    gateway = house(primary=votes(*UNSURE))
    reply = gateway.decide()
    [answer] = reply.json()["answers"]
    seen = answer["arbitrage"]
    assert (answer["choice"], seen["decided_by"], seen["candidates"]) == ("b", "guardian", [0, 1])
    assert (seen["alpha"], seen["guarantee"]) == (0.05, "crc")
    assert [(leg["role"], leg["model"]) for leg in seen["legs"]] == [("primary", "m"), ("guardian", "m")]
    for leg in seen["legs"]:
        assert leg["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        assert leg["cost"] == pytest.approx(15e-6)
        assert leg["latency"] > 0
    assert reply.headers["x-arbitrage-decision-id"] == seen["id"]


def test_each_question_is_a_decision_and_a_record_of_its_own(house):
    gateway = house()
    reply = gateway.decide({**DECISION, "questions": [{**QUESTION, "name": f"q{k}"} for k in range(3)]}).json()
    ids = [answer["arbitrage"]["id"] for answer in reply["answers"]]
    assert [answer["name"] for answer in reply["answers"]] == ["q0", "q1", "q2"]
    assert {record.id for record in gateway.records()} == set(ids)
    assert len(set(ids)) == 3


def test_usage_is_that_of_all_questions_and_legs(house):
    gateway = house(primary=votes(*UNSURE))
    usage = gateway.decide({**DECISION, "questions": [QUESTION, QUESTION]}).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (40, 20, 60)


def test_a_guarantee_that_is_gone_says_why(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(), task={"safe_action": "c"})
    [answer] = gateway.decide().json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"], answer["arbitrage"]["guarantee"]) == (
        "c", "fallback", "none",
    )  # fmt: skip
    assert "Guardian failed" in answer["arbitrage"]["reason"]


def test_a_safe_action_s_probability_is_one_whatever_the_scores(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(), task={"safe_action": "c"})
    [answer] = gateway.decide().json()["answers"]
    assert [share["probability"] for share in answer["probabilities"]] == [0, 0, 1]


def test_headers_and_object_of_a_completion_agree(house):
    gateway = house(form="text")
    reply = gateway.chat()
    seen = reply.json()["arbitrage"]
    assert reply.json()["choices"][0]["message"]["content"] == "mine"
    assert reply.headers["x-arbitrage-decision-id"] == seen["id"]
    assert reply.headers["x-arbitrage-decided-by"] == seen["decided_by"] == "primary"
    assert reply.headers["x-arbitrage-alpha"] == "0.05"
    assert float(reply.headers["x-arbitrage-cost"]) == pytest.approx(15e-6)
    assert set(seen["legs"][0]) >= {"role", "model", "usage", "cost", "latency"}


@pytest.mark.parametrize("form", ["menu", "text"])
def test_relaxation_margin_and_scores_are_shown_on_full_only(house, form):
    for expose in ("id", "full"):
        gateway = house(form=form, policy={"expose": expose})
        seen = gateway.chat(MENU if form == "menu" else CHAT).json()["arbitrage"]
        assert ({"relaxation", "margin"} <= set(seen)) is (expose == "full")
        assert ("scores" in seen["legs"][0]) is (expose == "full")


def test_what_replies_hide_the_records_of_a_calling_key_hide_too(house):
    for expose in ("id", "full"):
        gateway = house(policy={"expose": expose})
        key = gateway.keyed("call")
        gateway.restart()
        id = gateway.decide(headers=key).headers["x-arbitrage-decision-id"]
        one = gateway.get(f"/v1/arbitrage/records/{id}", headers=key).text
        many = gateway.get("/v1/arbitrage/records", headers=key).text
        for text in (one, many):
            assert id in text
            for hidden in ("relaxation", "margin", "scores"):
                assert (f'"{hidden}"' in text) is (expose == "full")
        reviewer = gateway.get(f"/v1/arbitrage/records/{id}", headers=gateway.keyed("review")).json()
        assert reviewer["decision"]["relaxation"] == 0.3


def test_actions_in_a_chat_request_make_a_menu(house):
    reply = house().chat(MENU).json()
    assert reply["choices"][0]["message"]["content"] == "a"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["object"] == "chat.completion"


def test_an_enum_in_the_response_format_makes_a_menu_and_is_answered_in_that_format(house):
    gateway = house()
    reply = gateway.chat({**CHAT, "response_format": enum_format("verdict", "yes", "no")}).json()
    assert reply["choices"][0]["message"]["content"] == '{"verdict": "yes"}'
    assert [c["value"] for c in gateway.primary.bodies[0]["questions"][0]["choices"]] == ["yes", "no"]


def test_an_enum_of_other_values_than_texts_is_answered_with_those_values(house):
    gateway = house()
    reply = gateway.chat({**CHAT, "response_format": enum_format("level", 1, 2, None, True)}).json()
    assert reply["choices"][0]["message"]["content"] == '{"level": 1}'
    assert [c["value"] for c in gateway.primary.bodies[0]["questions"][0]["choices"]] == ["1", "2", "null", "true"]


def test_two_properties_or_no_enum_do_not_make_a_menu(house):
    gateway = house()
    two = enum_format("verdict", "yes", "no")
    two["json_schema"]["schema"]["properties"]["why"] = {"type": "integer"}
    for given in (two, {"type": "json_object"}, enum_format("verdict")):
        error_of(gateway.chat({**CHAT, "response_format": given}), 422, "wrong_form")
    assert not gateway.primary.bodies


def test_tools_do_not_go_with_a_menu(house):
    gateway = house()
    assert error_of(gateway.chat({**MENU, "tools": [TOOL]}), 422)["param"] == "tools"
    assert not gateway.primary.bodies


def test_a_menu_is_refused_by_a_policy_over_free_text(house):
    gateway = house(form="text")
    error_of(gateway.chat(MENU), 422, "wrong_form")
    error_of(gateway.decide(), 422, "wrong_form")
    assert not gateway.primary.bodies


RICH = {
    "messages": [
        {"role": "system", "content": "Be kind.", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Ünïcode \u2028 \U0001f600"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [TOOL, {"type": "function", "function": {"name": "other", "strict": True, "parameters": {}}}],
    "tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": True, "stop": ["x", "y"],
    "metadata": {"a": "b"}, "user": "u", "response_format": {"type": "json_object"}, "store": False, "verbosity": "low",
}  # fmt: skip


def test_request_bodies_reach_both_upstreams_unchanged(house):
    gateway = house(form="text", primary=says("mine", 0.4), task={"settings": "as requested"})
    assert gateway.chat({"model": "support", **RICH}).json()["arbitrage"]["decided_by"] == "guardian"
    for upstream, added in ((gateway.primary, {"logprobs": True}), (gateway.guardian, {})):
        [body] = upstream.bodies
        assert body == {**RICH, "model": "m", "temperature": 0.1, **added}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("sure", [0.9, 0.4])
def test_tool_calls_come_back_as_the_model_made_them(house, choice, sure):
    calls = [CALL, {**CALL, "id": "c2"}]
    gateway = house(
        form="text",
        primary=says(None, sure, tool_calls=calls, finish="tool_calls"),
        guardian=says(None, tool_calls=calls[:1], finish="tool_calls"),
    )
    body = {**CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": True}
    [found] = gateway.chat(body).json()["choices"]
    assert found["message"]["tool_calls"] == (calls if sure > 0.5 else calls[:1])
    assert found["finish_reason"] == "tool_calls"
    streamed = chunks(gateway.chat({**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in streamed]
    assert [delta[0]["id"] for delta in deltas if delta] == [c["id"] for c in found["message"]["tool_calls"]]


def test_more_than_one_answer_is_refused(house):
    gateway = house(form="text")
    assert error_of(gateway.chat({**CHAT, "n": 2}), 400)["param"] == "n"
    assert gateway.chat({**CHAT, "n": 1}).status_code == 200


OVERRIDES = [("temperature", 0.7), ("top_p", 0.5), ("max_tokens", 3), ("seed", 1), ("reasoning_effort", "high"),
             ("logit_bias", {"1": 5}), ("presence_penalty", 1.0)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OVERRIDES)
def test_a_strict_policy_refuses_a_field_that_overrides_a_pinned_setting(house, name, value):
    gateway = house(form="text", policy={"strict": True})
    assert error_of(gateway.chat({**CHAT, name: value}), 422, "pinned_setting")["param"] == name
    assert not gateway.primary.bodies
    assert gateway.chat({**CHAT, "temperature": 0.1}).status_code == 200  # what is pinned may be said


@pytest.mark.parametrize(("name", "value"), OVERRIDES)
def test_any_other_marks_the_reply_as_under_no_guarantee(house, name, value):
    gateway = house(form="text")
    seen = gateway.chat({**CHAT, name: value}).json()["arbitrage"]
    assert (seen["guarantee"], name in seen["reason"]) == ("none", True)
    assert gateway.primary.bodies[0][name] == value


def test_what_overrides_the_guardian_alone_is_an_override_too(house):
    gateway = house(form="text", models={"guardian": {"temperature": 0.5}}, policy={"strict": True})
    error_of(gateway.chat({**CHAT, "temperature": 0.1}), 422, "pinned_setting")


def test_model_names_a_policy_or_an_alias_and_nothing_else(house):
    gateway = house(policy={"aliases": ["gpt-4o"]})
    assert gateway.decide({**DECISION, "model": "gpt-4o"}).json()["model"] == "support"
    for model in ("support@0.5", "support:0.1", "m", ""):
        assert error_of(gateway.decide({**DECISION, "model": model}), 404, "model_not_found")["param"] == "model"


def test_models_lists_the_aliases_of_policies_too(house):
    listed = house(policy={"aliases": ["gpt-4o", "gpt-4o-mini"]}).get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["support", "gpt-4o", "gpt-4o-mini"]
    assert [model["arbitrage"].get("alias_of") for model in listed] == [None, "support", "support"]


def test_models_lists_the_policies(house):
    listed = house().get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["object"]) for model in listed["data"]] == [("support", "model")]


def test_every_route_and_method_that_is_not_there_answers_in_the_same_shape(house):
    gateway = house()
    error_of(gateway.get("/v1/nothing"), 404)
    error_of(gateway.get("/v1"), 404)
    reply = gateway.get("/v1/decisions")
    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"


def test_the_schema_lists_every_route(house):
    gateway = house()
    document = gateway.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for method, path in [*PATHS, ("GET", "/metrics"), ("POST", "/v1/responses")]:
        assert method.lower() in document["paths"][path], path


def test_records_come_newest_first_with_filters_and_a_cursor(house):
    gateway = house()
    ids = [gateway.decide().headers["x-arbitrage-decision-id"] for _ in range(5)]
    gateway.primary.reply = votes(*UNSURE)
    ids.append(gateway.decide().headers["x-arbitrage-decision-id"])
    page = gateway.get("/v1/arbitrage/records?limit=4").json()
    assert [record["id"] for record in page["data"]] == ids[:1:-1]
    rest = gateway.get(f"/v1/arbitrage/records?limit=4&before={page['next']}").json()
    assert [record["id"] for record in rest["data"]] == ids[1::-1]
    by_guardian = gateway.get("/v1/arbitrage/records?decided_by=guardian").json()["data"]
    assert [record["id"] for record in by_guardian] == ids[5:]
    assert gateway.get("/v1/arbitrage/records?policy=other").json()["data"] == []
    created = page["data"][0]["created"]
    assert len(gateway.get(f"/v1/arbitrage/records?until={created - 1000}").json()["data"]) == 0
    assert len(gateway.get(f"/v1/arbitrage/records?since={created - 1000}").json()["data"]) == 6


@pytest.mark.parametrize(
    "query", ["since=nan", "until=inf", "limit=0", "limit=1.5", "limit=x", "limit=1e400", "who=me"]
)
def test_filters_that_make_no_sense_are_refused(house, query):
    error_of(house().get(f"/v1/arbitrage/records?{query}"), 400)


def test_feedback_is_kept_with_its_record(house):
    gateway = house()
    id = gateway.decide().headers["x-arbitrage-decision-id"]
    for told in ({"grade": 0.5}, {"label": "b", "comment": "ü"}, {"grades": {"primary": 1, "guardian": 0}}):
        assert gateway.post(f"/v1/arbitrage/records/{id}/feedback", told).status_code == 200
    kept = gateway.get(f"/v1/arbitrage/records/{id}").json()["feedback"]
    assert [f["grade"] for f in kept] == [0.5, None, None]
    assert kept[2]["grades"] == {"primary": 1, "guardian": 0, "chain": []}


@pytest.mark.parametrize(
    "told", [{}, {"grade": 2}, {"grade": "1"}, {"grades": {"primary": 1}}, {"who": 1}, [], {"label": 1.5}]
)
def test_feedback_that_says_nothing_or_nonsense_is_refused(house, told):
    gateway = house()
    id = gateway.decide().headers["x-arbitrage-decision-id"]
    assert gateway.post(f"/v1/arbitrage/records/{id}/feedback", told).status_code in (400, 422)
    error_of(gateway.post("/v1/arbitrage/records/nothing/feedback", {"grade": 1}), 404, "record_not_found")


def test_health_and_metrics_answer(house):
    gateway = house()
    gateway.decide()
    assert gateway.get("/health/live").json() == {"status": "alive"}
    assert gateway.get("/health/ready").json() == {"status": "ready", "policies": ["support"]}
    figures = gateway.get("/metrics").text
    assert 'arbitrage_decisions_total{decided_by="primary",policy="support"} 1.0' in figures
    assert "arbitrage_commit_seconds_count 1.0" in figures


@pytest.mark.parametrize("content", ["hashed", "off", "full"])
def test_the_record_keeps_as_much_content_as_the_policy_says(house, content):
    gateway = house(policy={"content": content})
    [record] = [gateway.decide() and gateway.records()[0]]
    kept = record.decision.content
    assert ("A letter." in str(kept)) is (content == "full")
    assert (kept is None) is (content == "off")


def test_a_guardian_that_fails_is_a_502_without_what_the_upstream_said(house):
    secret = "the patient's name is Kim and the key is sk-abcdefgh12345678"
    gateway = house(primary=votes(*UNSURE), guardian=failing(400, secret))
    error = error_of(gateway.decide(), 502, "guardian_failed")
    assert "Kim" not in error["message"]
    assert "abcdefgh" not in error["message"]
    assert str(gateway.guardian.port) not in error["message"]


def test_a_primary_that_fails_leaves_the_decision_to_the_guardian_and_its_words_out_of_the_reply(house):
    gateway = house(primary=failing(500, "Kim"))
    reply = gateway.decide()
    [answer] = reply.json()["answers"]
    assert (answer["arbitrage"]["decided_by"], answer["arbitrage"]["legs"][0]["failed"]) == ("guardian", True)
    assert "Kim" not in reply.text


def test_upstreams_that_send_extreme_json_do_no_harm(house):
    from aiohttp import web

    odd = (
        '{"model":"m","choices":[{"message":{"role":"assistant","content":"\\ud800 \\u0000"},"finish_reason":"stop"}]}'
    )
    gateway = house(form="text", primary=lambda *_: web.Response(text=odd, content_type="application/json"))
    assert gateway.chat().json()["arbitrage"]["decided_by"] == "guardian"


def test_messages_without_content_or_of_any_shape_are_tolerated(house):
    gateway = house()
    for messages in ([{"role": "user"}], [{"role": "user", "content": None, "refusal": None}], MESSAGES * 50):
        assert gateway.chat({**MENU, "messages": messages}).status_code == 200


def test_metrics_show_failed_legs_by_error_and_open_breakers(house):
    gateway = house(primary=failing(500))
    for _ in range(10):
        assert gateway.decide().status_code == 200
    figures = gateway.get("/metrics").text
    assert 'arbitrage_upstream_errors_total{error="UpstreamError",policy="support",role="primary"} 10.0' in figures
    resting = {line.split("} ")[1] for line in figures.splitlines() if line.startswith("arbitrage_upstream_resting{")}
    assert resting == {"1.0", "0.0"}


def test_a_replaced_decision_under_a_key_is_listed_by_the_gateway_as_a_fallback(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(400), task={"safe_action": "c"})
    reply = gateway.decide(DECISION, headers={"Idempotency-Key": "k"})
    assert reply.status_code == 200, reply.text
    listed = gateway.get("/v1/arbitrage/records?decided_by=fallback").json()["data"]
    assert [record["id"] for record in listed] == [reply.headers["x-arbitrage-decision-id"]]
