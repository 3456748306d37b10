"""A gateway whose Guardian is a team of people, and reviewers who work through its HTTP API."""

import threading
import time

import requests

from conformal_arbitrage.gateway import audits
from tests.gateway.house import House, section, until

TEAM = "support team"
LONG = 30.0
"""Seconds for what should happen soon, on a machine that is busy."""


class PeopleHouse(House):
    """A house with people as Guardian: `panel`, `rule` and the like in `human`, [policies.support.review] in `review`."""

    def __init__(self, folder, *, human=None, review=None, members=("ann", "bob", "cid"), leads=(), **options):
        self.human, self.members, self.leads = human or {}, members, leads
        self.review = {"wait": 50.0, "undo": 0.0, **(review or {})}
        super().__init__(folder, **options)

    def _write(self, first):
        primary = {"kind": "decisions", "url": self.primary.url, "model": "m", "price": [1.0, 1.0], "attempts": 1}
        parts = [
            section("task", {"form": "menu", **self.sections["task"]}),
            section("primary", primary),
            section("primary.pinned", {}),
            section("guardian", {"kind": "human", "name": TEAM, **self.human}),
            section(f'teams."{TEAM}"', {"members": list(self.members), "leads": list(self.leads)}),
        ]
        parts += [section(name, values) for name, values in self.sections.items() if name.startswith("gateway")]
        for name, values in self.sections.items():
            if name.startswith("policies."):
                fields = {key: value for key, value in {**first, **values}.items() if value is not None}
                parts += [section(name, fields), section(f"{name}.review", self.review)]
        self.path.write_text("\n".join(parts))

    def reviewer(self, label, scope="review"):
        return Reviewer(self, {"Authorization": f"Bearer {self.key(scope, label)[0]}"}, label)


class GradingHouse(House):
    """A house in free text whose answers people grade: [policies.support.graders] in `graders`."""

    def __init__(
        self, folder, *, graders=None, review=None, members=("ann", "bob", "cid"), leads=(), policy=None, **options
    ):
        self.graders, self.members, self.leads = graders or {}, members, leads
        self.review = {"undo": 0.0, **(review or {})}
        settings = {"content": "full", "grading": "review", "audit_rate": 1.0, **(policy or {})}
        super().__init__(folder, form="text", policy=settings, **options)

    def start(self):
        audits.PAUSE = 0.1  # which is short for people, and long for a test
        super().start()

    def _write(self, first):
        super()._write(first)
        parts = [
            section(f'teams."{TEAM}"', {"members": list(self.members), "leads": list(self.leads)}),
            section("policies.support.review", self.review),
        ]
        parts += [section("policies.support.graders", self.graders)] if self.graders else []
        self.path.write_text("\n".join([self.path.read_text(), *parts]))

    reviewer = PeopleHouse.reviewer


class Reviewer:
    """Somebody with a key of scope review."""

    def __init__(self, house, headers, label=""):
        self.house, self.headers, self.label = house, headers, label

    def post(self, path, body=None, **rest):
        return self.house.post(f"/v1/arbitrage/reviews/{path}", body or {}, headers=self.headers, **rest)

    def claim(self):
        """The next question; None if there is none."""
        reply = self.post("claim")
        assert reply.status_code in (200, 204), reply.text
        return reply.json() if reply.status_code == 200 else None

    def wait(self):
        """The next question, once there is one."""
        return until(self.claim, LONG)

    def vote(self, held, choice):
        return self.post(f"{held['token']}/vote", {"choice": choice})

    def grade(self, held, *grades):
        return self.post(f"{held['token']}/vote", {"grades": grades})

    def decide(self, choice):
        """Take the next question and vote."""
        held = self.wait()
        assert self.vote(held, choice).status_code == 200
        return held


class Later:
    """A call in a thread of its own."""

    def __init__(self, call):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call):
        try:
            self._outcome = call()
        except (requests.RequestException, OSError) as error:
            self._outcome = error

    @property
    def done(self):
        return not self._thread.is_alive()

    def result(self):
        self._thread.join(60)
        assert self.done
        return self._outcome


def settled(seconds=0.6):
    """Let the gateway look at the queue twice, for a test that nothing happens."""
    time.sleep(seconds)
