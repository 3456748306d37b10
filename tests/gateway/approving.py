"""A gateway in free text whose tool calls a team of people approves."""

import json

from tests.gateway.house import CHAT, House, says, section
from tests.gateway.people import TEAM, Later, Reviewer

PARAMETERS = {
    "type": "object",
    "properties": {"order": {"type": "string"}, "amount": {"type": "number", "minimum": 0, "maximum": 500}},
    "required": ["order", "amount"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "refund_order", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}},
]
REQUEST = {**CHAT, "tools": TOOLS}
ARGUMENTS = '{"order":"A-17","amount":900}'
FEWER = '{"order": "A-17", "amount": 90}'


def call(name="refund_order", arguments=ARGUMENTS, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, sure=0.9, content=None, **rest):
    """An upstream that wants to make calls."""
    return says(content, sure, tool_calls=list(calls) or [call()], finish="tool_calls", **rest)


class ApprovingHouse(House):
    """A house in free text: [policies.support.review] in `review`, who approves in `members` and `leads`."""

    def __init__(self, folder, *, review=None, members=("ann", "bob"), leads=(), **options):
        self.review = {"wait": 50.0, "undo": 0.0, "tool_calls": ["refund_*"], **(review or {})}
        self.members, self.leads = members, leads
        fields = {"form": "text", "primary": calling(), "guardian": calling(call(arguments='{"order":"B","amount":1}'))}
        super().__init__(folder, **{**fields, **options})

    def _write(self, first):
        super()._write(first)
        team = section(f'teams."{TEAM}"', {"members": list(self.members), "leads": list(self.leads)})
        review = section("policies.support.review", self.review)
        self.path.write_text("\n".join([self.path.read_text(), team, review]))

    def reviewer(self, label, scope="review"):
        return Approver(self, {"Authorization": f"Bearer {self.key(scope, label)[0]}"}, label)

    def ask_for(self, body=REQUEST, key=None, path="/v1/chat/completions"):
        """An answer that is being waited for."""
        headers = {} if key is None else {"Idempotency-Key": key}
        return Later(lambda: self.post(path, body, headers={**self.headers, **headers}))


class Approver(Reviewer):
    """Somebody who may approve."""

    def answer(self, choice, arguments=None):
        """Take the next question and answer it."""
        held = self.wait()
        reply = self.respond(held, choice, arguments)
        assert reply.status_code == 200, reply.text
        return held

    def respond(self, held, choice, arguments=None):
        body = {"choice": ("approve", "edit", "reject").index(choice)}
        return self.post(f"{held['token']}/vote", body if arguments is None else {**body, "arguments": arguments})


def message_of(reply):
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return choice["message"], choice["finish_reason"], reply.json()["arbitrage"]


def arguments_of(message):
    [made] = message["tool_calls"]
    return json.loads(made["function"]["arguments"])
