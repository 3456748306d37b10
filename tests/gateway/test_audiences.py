"""Who sees what: every route of the gateway and its console, opened with every kind of key, against one table."""

import random
import re

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.audience import Views
from conformal_arbitrage.gateway.auth import digest
from conformal_arbitrage.gateway.console.app import console_routes
from conformal_arbitrage.store import events, keys, pages, reviews
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.record import Event, FeedbackBody, new_id
from conformal_arbitrage.store.session import StoreView, View
from tests.console.filled import Visit, token_of
from tests.gateway.house import CHAT, DECISION, MENU, until, votes
from tests.gateway.people import LONG, Later, PeopleHouse

KEYS = ("none", "wrong", "call", "review", "operate", "admin", "call@", "review@", "operate@", "admin@")
"""No key, one that does not exist, and one of each scope: good for everything, and (@) bound to the policy `sales`."""
NOTHING = {"certificate": {}}
WHY = {"reason": "because"}
VOTE = {"choice": 0}
GRADE = {"grade": 1}
FORM = {}

# Route; what is asked for; what is sent; the status for each of KEYS. {judged} is a decision of `sales` that the key call@
# asked for, and nobody has to judge; {unjudged} one of `support` by the key call, which was drawn for an audit by people.
TABLE = """
POST /v1/decisions
    /v1/decisions                            DECISION 401 401 200 200 403 200 403 403 403 403
POST /v1/chat/completions
    /v1/chat/completions                     MENU     401 401 200 200 403 200 403 403 403 403
POST /v1/responses
    /v1/responses                            CHAT     401 401 400 400 403 400 400 400 403 400
GET /v1/models
    /v1/models                               -        401 401 200 200 403 200 200 200 403 200
GET /v1/models/{id}
    /v1/models/support                       -        401 401 200 200 403 200 403 403 403 403
    /v1/models/absent                        -        401 401 404 404 403 404 403 403 403 403
GET /v1/arbitrage/records
    /v1/arbitrage/records                    -        401 401 200 200 403 200 200 200 403 200
    /v1/arbitrage/records?policy=support     -        401 401 200 200 403 200 403 403 403 403
GET /v1/arbitrage/records/{id}
    /v1/arbitrage/records/{unjudged}         -        401 401 200 404 403 200 404 404 403 404
    /v1/arbitrage/records/{judged}           -        401 401 404 200 403 200 200 200 403 200
POST /v1/arbitrage/records/{id}/feedback
    /v1/arbitrage/records/{unjudged}/feedback GRADE    401 401 200 200 403 200 404 404 403 404
    /v1/arbitrage/records/{judged}/feedback  GRADE    401 401 404 200 403 200 200 200 403 200
GET /v1/arbitrage/policies/{name}
    /v1/arbitrage/policies/support           -        401 401 403 403 200 200 403 403 403 403
    /v1/arbitrage/policies/sales             -        401 401 403 403 200 200 403 403 200 200
GET /v1/arbitrage/policies/{name}/monitor
    /v1/arbitrage/policies/support/monitor   -        401 401 403 403 200 200 403 403 403 403
    /v1/arbitrage/policies/sales/monitor     -        401 401 403 403 200 200 403 403 200 200
POST /v1/arbitrage/policies/{name}/lift
    /v1/arbitrage/policies/support/lift      WHY      401 401 403 403 403 409 403 403 403 403
    /v1/arbitrage/policies/sales/lift        WHY      401 401 403 403 403 409 403 403 403 409
PUT /v1/arbitrage/policies/{name}
    /v1/arbitrage/policies/support           NOTHING  401 401 403 403 403 422 403 403 403 403
    /v1/arbitrage/policies/sales             NOTHING  401 401 403 403 403 422 403 403 403 422
POST /v1/arbitrage/policies/{name}/rollback
    /v1/arbitrage/policies/support/rollback  NOTHING  401 401 403 403 403 409 403 403 403 403
    /v1/arbitrage/policies/sales/rollback    NOTHING  401 401 403 403 403 409 403 403 403 409
GET /v1/arbitrage/reviews
    /v1/arbitrage/reviews                    -        401 401 403 200 403 200 403 403 403 403
GET /v1/arbitrage/reviews/{decision}
    /v1/arbitrage/reviews/{unjudged}         -        401 401 404 404 403 404 404 404 403 404
POST /v1/arbitrage/reviews/claim
    /v1/arbitrage/reviews/claim              NOTHING  401 401 403 200 403 200 403 403 403 403
POST /v1/arbitrage/reviews/{token}/renew
    /v1/arbitrage/reviews/x/renew            NOTHING  401 401 403 409 403 409 403 403 403 403
POST /v1/arbitrage/reviews/{token}/return
    /v1/arbitrage/reviews/x/return           NOTHING  401 401 403 204 403 204 403 403 403 403
POST /v1/arbitrage/reviews/{token}/skip
    /v1/arbitrage/reviews/x/skip             NOTHING  401 401 403 409 403 409 403 403 403 403
POST /v1/arbitrage/reviews/{token}/vote
    /v1/arbitrage/reviews/x/vote             VOTE     401 401 403 409 403 409 403 403 403 403
POST /v1/arbitrage/reviews/{token}/undo
    /v1/arbitrage/reviews/x/undo             NOTHING  401 401 403 409 403 409 403 403 403 403
POST /v1/arbitrage/webhooks/{name}/test
    /v1/arbitrage/webhooks/x/test            NOTHING  401 401 403 403 403 404 403 403 403 403
GET /metrics
    /metrics                                 -        401 401 403 403 200 200 403 403 200 200
GET /
    /                                        -        200 200 200 200 200 200 200 200 200 200
GET /health/live
    /health/live                             -        200 200 200 200 200 200 200 200 200 200
GET /health/ready
    /health/ready                            -        200 200 200 200 200 200 200 200 200 200
GET /openapi.json
    /openapi.json                            -        200 200 200 200 200 200 200 200 200 200
GET /console
    /console                                 -        303 303 303 303 200 200 303 303 200 200
GET /console/decisions
    /console/decisions                       -        303 303 303 200 403 200 303 200 403 200
    /console/decisions?policy=support        -        303 303 303 200 403 200 303 403 403 403
    /console/decisions?mark=audited          -        303 303 303 400 403 200 303 400 403 200
GET /console/decisions/{id}
    /console/decisions/{unjudged}            -        303 303 303 404 403 200 303 404 403 404
    /console/decisions/{judged}              -        303 303 303 200 403 200 303 200 403 200
GET /console/policies/{name}
    /console/policies/support                -        303 303 303 403 200 200 303 403 403 403
    /console/policies/sales                  -        303 303 303 403 200 200 303 403 200 200
POST /console/policies/{name}/check
    /console/policies/support/check          FORM     401 401 401 403 403 200 401 403 403 403
    /console/policies/sales/check            FORM     401 401 401 403 403 200 401 403 403 200
POST /console/policies/{name}/install
    /console/policies/support/install        FORM     401 401 401 403 403 422 401 403 403 403
POST /console/policies/{name}/rollback
    /console/policies/support/rollback       FORM     401 401 401 403 403 409 401 403 403 403
POST /console/policies/{name}/lift
    /console/policies/support/lift           FORM     401 401 401 403 403 422 401 403 403 403
POST /console/policies/{name}/renew
    /console/policies/support/renew          FORM     401 401 401 403 403 409 401 403 403 403
POST /console/policies/{name}/choose
    /console/policies/support/choose         FORM     401 401 401 403 403 422 401 403 403 403
GET /console/review
    /console/review                          -        303 303 303 200 403 200 303 200 403 200
POST /console/review
    /console/review                          FORM     401 401 401 200 403 200 401 403 403 403
POST /console/review/renew
    /console/review/renew                    FORM     401 401 401 409 403 409 401 403 403 403
POST /console/review/return
    /console/review/return                   FORM     401 401 401 204 403 204 401 403 403 403
GET /console/team
    /console/team                            -        303 303 303 200 403 200 303 403 403 403
GET /console/keys
    /console/keys                            -        303 303 303 403 403 200 303 403 403 200
POST /console/keys
    /console/keys                            FORM     401 401 401 403 403 422 401 403 403 422
POST /console/keys/exclude
    /console/keys/exclude                    FORM     401 401 401 403 403 422 401 403 403 403
POST /console/keys/revoke
    /console/keys/revoke                     FORM     401 401 401 403 403 404 401 403 403 404
GET /console/health
    /console/health                          -        303 303 303 403 200 200 303 403 403 403
POST /console/webhooks/{name}/test
    /console/webhooks/x/test                 FORM     401 401 401 403 403 404 401 403 403 403
GET /console/changes
    /console/changes                         -        303 303 303 200 200 200 303 200 200 200
GET /console/sign-in
    /console/sign-in                         -        200 200 200 200 200 200 200 200 200 200
POST /console/sign-in
    /console/sign-in                         FORM     401 401 401 403 403 403 401 403 403 403
GET /console/static/{digest}/{file}
    /console/static/x/y                      -        404 404 404 404 404 404 404 404 404 404
GET /console/{rest:path}
    /console/absent                          -        303 303 303 404 404 404 303 404 404 404
POST /console/sign-out
    /console/sign-out                        FORM     401 401 401 303 303 303 401 303 303 303
"""


def rows():
    """Yield method, route, what is asked for, what is sent, and statuses."""
    route = []
    for line in TABLE.strip().splitlines():
        if line.startswith(" "):
            yield *route, *line.split()
        else:
            route = line.split()


ROWS = list(rows())
BODIES = {
    "DECISION": DECISION,
    "MENU": MENU,
    "CHAT": CHAT,
    "NOTHING": NOTHING,
    "WHY": WHY,
    "VOTE": VOTE,
    "GRADE": GRADE,
}


class Town(PeopleHouse):
    """A gateway with two policies, people as Guardian, a key of every kind, and a decision of each policy."""

    def __enter__(self):
        super().__enter__()
        self.secrets, self.ids = {"none": None, "wrong": "arb-wrong"}, {}
        for name in KEYS[2:]:
            self.secrets[name], self.ids[name] = f"arb-{new_id()}", new_id()
            fields = {"scope": name.strip("@"), "label": name, "policies": ("sales",) if name.endswith("@") else None}
            self._create(self.ids[name], self.secrets[name], **fields)
        self.visits = {name: self.signed_in(name) for name in KEYS}
        self.unjudged = self._decided("support", "call")
        self.judged = self._decided("sales", "call@")
        return self

    def _create(self, id, secret, **fields):
        self.with_store(lambda store: store.run(keys.create, id=id, sha256=digest(secret), **fields))

    def _decided(self, policy, name):
        reply = self.decide({**DECISION, "model": policy, "input": "I am sure."}, headers=self.key_of(name))
        assert reply.status_code == 200, reply.text
        return reply.headers["x-arbitrage-decision-id"]

    def signed_in(self, name):
        """A browser in which someone has signed in with a kind of key, if the console lets them."""
        visit = Visit(self)
        visit.send_form("/console/sign-in", visit.open("/console/sign-in"), key=self.secrets[name] or "")
        return visit

    def key_of(self, name):
        secret = self.secrets[name]
        return {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def open(self, name, method, path, body="-"):
        """Ask for a path as one kind of key."""
        path = path.format(unjudged=self.unjudged, judged=self.judged)
        if path.endswith("/claim"):
            self._decided("support", "call")  # nobody has seen this one
        if not path.startswith("/console"):
            return self.ask(method, path, BODIES.get(body), headers=self.key_of(name))
        visit = self.visits[name]
        if path == "/console/sign-out":
            visit = self.signed_in(name)
        if method == "GET":
            return visit.open(path, allow_redirects=False)
        page = visit.open("/console")  # every page of somebody who is signed in has the token of their forms
        return visit.post(self.url + path, data={"csrf": token_of(page.text)}, timeout=60, allow_redirects=False)


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    settings = {"policies.support": {"audit_rate": 1.0, "content": "full"}, "policies.sales": {"content": "full"}}
    with Town(
        tmp_path_factory.mktemp("town"), primary=votes(0.9, 0.1), members=("review", "admin"), **settings
    ) as started:
        yield started


def routes_of(house):
    """Every method and path that the application and its console serve, from their own routing tables."""
    app = house.app.app._rest
    served = {(method, route.path) for route in app.routes for method in route.methods or () if method != "HEAD"}
    [console] = {route.endpoint for route in app.routes if route.path == "/console"}
    mounted = {path for _, path in served if path.startswith("/console")} | {
        route.path for route in app.routes if route.path.startswith("/console")
    }
    assert mounted == {"/console", "/console/{rest:path}"}
    ours = {pair for pair in served if pair[1] not in mounted}
    ours |= {
        (method, route.path)
        for route in app.routes
        if route.methods is None and route.path not in mounted
        for method in ["GET"]
    }
    return ours | {
        (method, route.path) for route in console_routes(console._gateway) for method in route.endpoint._handlers
    }


def test_the_table_has_every_route(town):
    assert {(method, route) for method, route, *_ in ROWS} == routes_of(town)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_a_route_opens_for_the_keys_of_the_table(town, row):
    method, _, path, body, *expected = row
    statuses = [town.open(name, method, path, body).status_code for name in KEYS]
    assert [f"{name} {status}" for name, status in zip(KEYS, statuses, strict=True)] == [
        f"{name} {status}" for name, status in zip(KEYS, expected, strict=True)
    ]


# --- What is shown ---

RECORD = {"id", "created", "policy", "key_id", "decided_by", "decision", "completion", "feedback"}
DECISION_FIELDS = {
    *("schema", "action", "candidates", "no_guarantee", "legs", "cost", "alpha", "version", "mode", "form", "content"),
    *("size", "overridden", "pending", "session", "held", "cancelled", "group"),
}
UNJUDGED_FIELDS = {"schema", "alpha", "version", "mode", "form", "content", "size", "overridden", "group"}
LEG_FIELDS = {"role", "spent", "seconds", "served", "reply"}


def listed(town, name):
    return town.open(name, "GET", "/v1/arbitrage/records?limit=1000").json()["data"]


def test_every_audience_lists_the_decisions_of_the_table(town):
    shown = {
        name: {record["id"] for record in listed(town, name)} for name in KEYS if name[:4] in ("call", "revi", "admi")
    }
    both = {town.judged, town.unjudged}
    assert {name: ids & both for name, ids in shown.items()} == {
        "call": {town.unjudged}, "review": {town.judged}, "admin": both,
        "call@": {town.judged}, "review@": {town.judged}, "admin@": {town.judged},
    }  # fmt: skip


def test_callers_see_what_replies_show_and_never_whether_there_was_an_audit(town):
    record = town.open("call", "GET", "/v1/arbitrage/records/{unjudged}").json()
    assert (set(record), set(record["decision"])) == (RECORD, DECISION_FIELDS)
    assert {name for leg in record["decision"]["legs"] for name in leg} == LEG_FIELDS
    assert listed(town, "call")[-1] == record
    town.open("review", "POST", "/v1/arbitrage/records/{unjudged}/feedback", "GRADE")
    given = {
        feedback["by"] for feedback in town.open("call", "GET", "/v1/arbitrage/records/{unjudged}").json()["feedback"]
    }
    assert given <= {town.ids["call"]}  # what others say tells of an audit


def test_admins_see_everything_of_one_record_and_in_lists_the_question_of_what_is_unjudged(town):
    record = next(record for record in listed(town, "admin") if record["id"] == town.unjudged)
    assert set(record) == {"id", "created", "policy", "key_id", "decision", "withheld"}
    assert set(record["decision"]) == UNJUDGED_FIELDS
    assert set(record["decision"]["content"]) == {"context", "actions", "request"}
    whole = town.open("admin", "GET", "/v1/arbitrage/records/{unjudged}").json()
    assert set(whole) == {*RECORD, "audit"}
    assert whole["decision"]["audited"]


def test_readiness_names_policies_to_operators_alone(town):
    replies = {name: town.open(name, "GET", "/health/ready").json() for name in KEYS}
    shown = {name: {field: sorted(words) if field == "policies" else words for field, words in reply.items()}
             for name, reply in replies.items()}  # fmt: skip
    ready = {"status": "ready"}
    every, some = {**ready, "policies": ["sales", "support"]}, {**ready, "policies": ["sales"]}
    special = {"operate": every, "admin": every, "operate@": some, "admin@": some}
    assert shown == {name: special.get(name, ready) for name in KEYS}


def test_metrics_of_a_bound_key_are_of_its_policies_alone(town):
    whole, bound = (town.open(name, "GET", "/metrics").text for name in ("operate", "operate@"))
    assert 'policy="support"' in whole
    assert "arbitrage_in_flight" in whole
    samples = [line for line in bound.splitlines() if not line.startswith("#")]
    assert samples
    assert all('policy="sales"' in line for line in samples)


@pytest.mark.parametrize("name", [name for name in KEYS if name.endswith("@")])
def test_no_page_of_a_bound_key_names_another_policy(town, name):
    for method, _, path, *_ in ROWS:
        if method == "GET" and "{unjudged}" not in path and path != "/openapi.json":
            text = town.open(name, method, path).text.replace(path, "").replace("support team", "")
            assert "support" not in text.replace("policy support needs another", ""), path


def test_lists_of_models_and_the_overview_have_the_policies_of_the_key(town):
    for name, policies in (("call", {"support", "sales"}), ("call@", {"sales"}), ("admin@", {"sales"})):
        assert {model["id"] for model in town.open(name, "GET", "/v1/models").json()["data"]} == policies


# --- Keys ---


def create(town, name, **fields):
    visit = town.visits[name]
    page = visit.open("/console/keys")
    filled = {"label": "new", "scope": "admin", "days": "", "policy": "", **fields}
    return visit.post(town.url + "/console/keys", data={"csrf": token_of(page.text), **filled}, timeout=60)


def made(town):
    return {key.id: key for key in town.with_store(lambda store: store.run(keys.list_all))}


def test_a_bound_admin_lists_makes_and_revokes_only_keys_of_its_policies(house):
    settings = {"policies.support": {}, "policies.sales": {}}
    town = house(Town, primary=votes(0.9, 0.1), members=("review",), **settings)
    page = town.visits["admin@"].open("/console/keys").text
    assert {name for name in KEYS[2:] if town.ids[name] in page} == {name for name in KEYS if name.endswith("@")}
    before = made(town)
    for policy in ("", "support", "absent"):
        assert create(town, "admin@", policy=policy).status_code == 403, policy
    assert made(town) == before
    assert create(town, "admin@", policy="sales").status_code == 200
    [new] = made(town).keys() - before.keys()
    assert made(town)[new].policies == ("sales",)
    for name in ("admin", "review"):
        reply = town.visits["admin@"].post(
            town.url + "/console/keys/revoke", data={"csrf": token_of(page), "id": town.ids[name]}, timeout=60
        )
        assert reply.status_code == 404, name
        assert made(town)[town.ids[name]].revoked is None
    reply = town.visits["admin@"].post(
        town.url + "/console/keys/revoke", data={"csrf": token_of(page), "id": new}, timeout=60
    )
    assert (reply.status_code, made(town)[new].revoked is None) == (200, False)


def test_the_store_itself_refuses_what_reaches_beyond_a_view(house):
    gateway = house(**{"policies.support": {}, "policies.sales": {}})
    id = gateway.decide().headers["x-arbitrage-decision-id"]
    secret, name = gateway.key("admin")
    headers = {"Authorization": f"Bearer {secret}"}

    async def tried(store):
        view = StoreView(store, View(policies=frozenset({"sales"})))
        fields = {"id": "new", "sha256": "0" * 64, "scope": "call", "label": ""}
        for policies in (None, ("support",), ("sales", "support")):
            with pytest.raises(StoreError, match="beyond sales"):
                await view.run(keys.create, **fields, policies=policies)
        assert await view.run(keys.list_all) == []
        assert not await view.run(keys.revoke, name)
        assert await view.run(pages.records) == []
        assert await view.run(pages.record, id) is None
        assert (await view.run(pages.marked_decisions, "audited")).records == []
        assert await view.run(stored_policies.history, "support") == []
        assert await view.run(stored_policies.lift, "support", reason="because", by="me") is None
        assert await view.run(events.tallies, since=0.0) == []
        with pytest.raises(StoreError, match="out of reach"):
            await view.run(events.add_feedback, Event(id=id, body=FeedbackBody(grade=1.0)))
        with pytest.raises(AttributeError):  # an operation that heeds no view does not run in one
            await view.run(keys.find, "0" * 64)

    gateway.with_store(tried)
    assert gateway.get(f"/v1/arbitrage/records/{id}", headers=headers).json()["feedback"] == []


# --- Blindness ---

READABLE = [
    *(path for method, _, path, *_ in ROWS if method == "GET" and "{" not in path and "static" not in path),
    "/v1/arbitrage/records?decided_by=primary&limit=1", "/v1/arbitrage/records?decided_by=guardian",
    "/v1/arbitrage/records?decided_by=fallback", "/console/decisions?who=primary", "/console/decisions?who=guardian",
]  # fmt: skip
READABLE.remove("/openapi.json")


def mixed(path, body, number):
    """A Primary that is sure of what says so."""
    return votes(*((0.9, 0.1) if "sure" in str(body) else (0.5, 0.4, 0.1)))(path, body, number)


def glance(town, paths=READABLE):
    """All that a reviewer can read now."""
    return {path: (reply.status_code, reply.text) for path in paths for reply in [town.open("review", "GET", path)]}


def clue(before, after):
    """What changed on a page, without names that are drawn at random; counts as they have changed."""
    lines = [re.split(r"\n|(?<=[,>])", text) for _, text in (before, after)]
    changed = [[line for line in ours if line not in set(theirs)] for ours, theirs in (lines, lines[::-1])]
    bare = [tuple(re.sub(r"[0-9a-z]{20,}|\d+", "#", line) for line in part) for part in changed]
    numbers = [
        [float(n) for line in part for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", line)][:8]
        for part in changed
    ]
    grown = tuple(round(new - old) for old, new in zip(*numbers, strict=False) if abs(new - old) < 100)
    return (before[0], after[0], *bare, grown)


def test_the_record_of_an_audit_is_hidden_from_the_moment_of_the_decision(crowd):
    for _ in range(5):
        reply = crowd.decide({**DECISION, "input": "I am sure."}, headers=crowd.key_of("call"))
        id = reply.headers["x-arbitrage-decision-id"]
        assert crowd.open("review", "GET", f"/v1/arbitrage/records/{id}").status_code == 404


def test_who_decided_is_no_filter_that_finds_what_is_hidden(crowd):
    filters = [f"decided_by={who}&limit={limit}" for who in ("primary", "guardian", "fallback") for limit in (1, 100)]

    def found():
        return [crowd.open("review", "GET", f"/v1/arbitrage/records?{query}").json() for query in ("", *filters)]

    before = found()
    crowd.decide({**DECISION, "input": "I am sure."}, headers=crowd.key_of("call"))
    assert found() == before


def test_reviewers_read_no_metrics(crowd):
    assert crowd.open("review", "GET", "/metrics").status_code == 403


@pytest.fixture
def crowd(house):
    """A gateway whose every decision by the Primary is audited by people."""
    settings = {"policies.support": {"audit_rate": 1.0, "content": "full"}, "policies.sales": {"content": "full"}}
    crowd = house(Town, primary=mixed, members=("review",), review={"wait": 50.0, "audit_spread": 0.0}, **settings)
    vote(crowd, claimed(crowd))  # on the decision of its beginning
    return crowd


def claimed(town):
    return town.post("/v1/arbitrage/reviews/claim", NOTHING, headers=town.key_of("review")).json()


def vote(town, held):
    reply = town.post(f"/v1/arbitrage/reviews/{held['token']}/vote", VOTE, headers=town.key_of("review"))
    assert reply.status_code == 200, reply.text
    until(lambda: not waiting(town), LONG)


def waiting(town):
    return town.with_store(lambda store: store.run(reviews.open_places))


def told(rounds):
    """How many rounds are told right from what is read, by what the same sight meant in all other rounds."""
    best = 0
    for path in rounds[0][1]:
        right = 0
        for place, (kind, sights) in enumerate(rounds):
            alike = [other for k, (other, theirs) in enumerate(rounds) if k != place and theirs[path] == sights[path]]
            right += alike.count(kind) > len(alike) / 2
        best = max(best, right)
    return best


def observed(town, audits):
    """Let a decision be made, and note what a reviewer sees at once, with the question before them, and with their vote."""
    before = glance(town)
    text = f"I am {'sure' if audits else 'in doubt'}."
    call = Later(lambda: town.decide({**DECISION, "input": text}, headers=town.key_of("call")))
    until(lambda: waiting(town), LONG)
    at_once = glance(town)
    held = claimed(town)
    holding = glance(town)
    vote(town, held)
    assert call.result().status_code == 200
    return {path: (clue(before[path], at_once[path]), clue(at_once[path], holding[path])) for path in before}


ROUNDS = 24
"""Of guesses by a fair coin, 22 of 24 are right once in 50,000 times, for each of the pages."""


def play(town, seed):
    coin = random.Random(seed)
    kinds = coin.sample([True, False] * (ROUNDS // 2), ROUNDS)
    return [(audits, observed(town, audits)) for audits in kinds]


@pytest.mark.proof
def test_reviewers_tell_audits_from_questions_no_better_than_chance(crowd):
    assert told(play(crowd, 1)) < 22


@pytest.mark.proof
def test_they_would_if_records_were_shown_before_they_are_judged(crowd, monkeypatch):
    monkeypatch.setattr(Views, "of", lambda views, caller: StoreView(views._store, View()))
    assert told(play(crowd, 2)) >= 22
