"""Run the calls of a module against a gateway and print what became of each, as JSON. Only the base URL is ours.

Runs in the environment of the clients, which has neither this package nor pytest.
"""

import asyncio
import inspect
import json
import sys
import traceback
from enum import Enum
from importlib.metadata import version

from pydantic import BaseModel

TEXT, MENU = "gpt-4o", "gpt-4o-mini"  # aliases of a free-text policy and of one over menus
RAIN = "It rains in Oslo."
SLOWLY = "What is the weather? Think slowly."  # a question that goes to the Guardian, which streams its answer


class Team(Enum):
    BILLING = "billing"
    BUG = "bug"
    OTHER = "other"


class Routed(BaseModel):
    """The team for a message."""

    team: Team


class Place(BaseModel):
    """A place."""

    city: str


def run(module, packages):
    """Run every function of a module whose name is in its list CALLS; print a JSON object per call."""
    failed = 0
    loop = asyncio.new_event_loop()  # one for all: clients keep connections
    asyncio.set_event_loop(loop)
    for call in module["CALLS"]:
        library = next(name for name in packages if call.__name__.startswith(name))
        outcome = {
            "library": packages[library], "version": version(packages[library]), "call": inspect.getdoc(call), "error": None,
        }  # fmt: skip
        try:
            result = call()
            if inspect.iscoroutine(result):
                loop.run_until_complete(result)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is the outcome
            failed += 1
            outcome["error"] = "".join(traceback.format_exception(error))[-2000:]
        print(json.dumps(outcome), flush=True)
    sys.exit(failed > 0)
