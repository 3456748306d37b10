"""Estimate: count what calls would cost, and send nothing.

Knows nothing of prompts or providers.
"""

from msgspec.structs import replace

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.types import Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, WholePort
from conformal_arbitrage.upstream.budget import request_size
from conformal_arbitrage.upstream.cache import Cache
from conformal_arbitrage.upstream.pricing import Pricing


class Estimate(WholePort):
    """Stand in for a port during a dry run: count what calls would take, and send nothing.

    Input is counted at four characters a token, output at the reply's limit, or 500 tokens where there is none.

    Args:
        port: the port the calls would go to.
        pricing: their price.
        stored: replies that are available already and cost nothing more.
        role: who would be asked: primary, guardian, judge.
    """

    def __init__(self, port: Port, pricing: Pricing | None, stored: Cache | None = None, *, role: str = "") -> None:
        self.origin = port.origin
        self.role = role
        self._pricing = pricing
        self._stored = stored
        self.spent = Spent()

    async def call(self, call: Call) -> Reply:
        """Count the call, and return a chat completion of the greatest length.

        Raises:
            ReplyError: the call was counted; paths other than chat completions have no placeholder reply.
        """
        stored = None if self._stored is None else self._stored.find(call)
        if stored is not None:
            return stored
        output = 500 if call.output_limit is None else call.output_limit
        spent = Spent(calls=1, input_tokens=request_size(call) // 4, output_tokens=output)
        self.spent += replace(spent, cost=None if self._pricing is None else self._pricing.cost(spent))
        if not call.path.startswith("/chat"):
            raise ReplyError("counted, not sent", spent=spent)
        message = {"role": "assistant", "content": "word " * output}
        return Reply(document={"choices": [{"message": message}]}, spent=spent)
