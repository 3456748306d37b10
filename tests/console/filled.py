"""A gateway whose console has something on every page: decisions, audits, feedback, an alarm, keys, hostile text."""

import hashlib
import json
import re

import requests

from conformal_arbitrage.store import events, keys
from conformal_arbitrage.store.record import new_id
from tests.gateway.house import House, until, votes

EVIL = (
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "javascript:alert(1)",
    "{{ 7 * 7 }}",
    "\u202egnirts desrever",
    "' onmouseover='document.title=1' x='",
)
QUESTION = {
    "type": "choice", "instructions": "Which <b>one</b>?",
    "choices": [{"value": text} for text in EVIL[:3]],
}  # fmt: skip


def sure_on_even(path, body, number):
    """A Primary that is sure of every second question."""
    return votes(*((0.9, 0.1) if number % 2 else (0.5, 0.4, 0.1)), model=EVIL[0])(path, body, number)


class Visit(requests.Session):
    """A browser without scripts: cookies, and forms with the token of their page."""

    def __init__(self, house, key=None):
        super().__init__()
        self.house = house
        self.headers["Sec-Fetch-Site"] = "same-origin"
        if key is not None:
            page = self.open("/console/sign-in")
            reply = self.send_form("/console/sign-in", page, key=key)
            assert reply.status_code == 200, reply.text

    def open(self, path, **options):
        return self.get(self.house.url + path, timeout=60, **options)

    def send_form(self, path, page, **fields):
        token = token_of(page.text)
        return self.post(self.house.url + path, data={"csrf": token, **fields}, timeout=60)


def token_of(text):
    return re.search(r'name="csrf" value="([0-9a-f]{64})"', text).group(1)


class Filled(House):
    """Starts with two policies: one that does well, one whose Primary has become worse."""

    def __init__(self, folder, **options):
        policies = {
            "policies.support": {"audit_rate": 1.0, "content": "full"},
            "policies.broken": {"audit_rate": 1.0, "content": "full"},
        }
        super().__init__(folder, primary=sure_on_even, guardian=votes(1, 0, model=EVIL[1]), **policies, **options)

    def __enter__(self):
        super().__enter__()
        try:
            self._fill()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _fill(self):
        for k in range(60):
            body = {"model": "support", "input": EVIL[k % len(EVIL)] + " letter", "questions": [QUESTION]}
            assert self.decide(body).status_code == 200
        self.guardian.reply = votes(0, 1, model=EVIL[1])
        for _ in range(60):
            body = {"model": "broken", "input": "A letter.", "questions": [QUESTION]}
            assert self.decide(body).status_code == 200
        until(lambda: self.get("/v1/arbitrage/policies/broken/monitor").json()["alarm"], 60)
        record = self.get("/v1/arbitrage/records?policy=support").json()["data"][0]
        assert self.post(f"/v1/arbitrage/records/{record['id']}/feedback", {"comment": EVIL[0]}).status_code == 200
        self.record = record["id"]
        self.with_store(lambda store: events.fold_tallies(store))
        self.keys = {scope: self.key(scope, label=f"{scope} {EVIL[1]}")[0] for scope in ("admin", "review", "call")}

    def fresh_key(self, scope="admin", label="someone", policies=None):
        """A key and its id, made in the store."""
        secret, name = f"arb-{new_id()}", new_id()
        sha256 = hashlib.sha256(secret.encode()).hexdigest()
        about = {"scope": scope, "label": label, "policies": policies}
        self.with_store(lambda store: store.run(keys.create, id=name, sha256=sha256, **about))
        return secret, name


def as_json(certificate):
    return json.dumps(certificate.to_dict())
