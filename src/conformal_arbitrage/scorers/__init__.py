"""Scorers, answerers and the ports they call; each kind in a file of its own."""

from conformal_arbitrage.scorers.answers import ChatAnswerer
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores
from conformal_arbitrage.scorers.chat import ChatScorer, Settings
from conformal_arbitrage.scorers.decisions import DecisionsScorer
from conformal_arbitrage.scorers.function import FunctionScorer
from conformal_arbitrage.scorers.human import HumanScorer
from conformal_arbitrage.scorers.local import LocalModel, LocalScorer
from conformal_arbitrage.scorers.logprob import LogprobScorer
from conformal_arbitrage.scorers.order import Shuffled
from conformal_arbitrage.scorers.prompts import Confidences, Pair, Prompt
from conformal_arbitrage.scorers.replay import ReplayScorer
from conformal_arbitrage.scorers.sampling import SamplingScorer
from conformal_arbitrage.upstream.base import Call, Port, Reply
from conformal_arbitrage.upstream.endpoint import Endpoint
from conformal_arbitrage.upstream.wrappers import Cache, Capped, Gate, Limit, Priced, Purse, Retry

__all__ = [
    "Answer",
    "Answerer",
    "Cache",
    "Call",
    "Capped",
    "ChatAnswerer",
    "ChatScorer",
    "Confidences",
    "DecisionsScorer",
    "Endpoint",
    "FunctionScorer",
    "Gate",
    "HumanScorer",
    "Identity",
    "Limit",
    "LocalModel",
    "LocalScorer",
    "LogprobScorer",
    "Pair",
    "Port",
    "Priced",
    "Prompt",
    "Purse",
    "ReplayScorer",
    "Reply",
    "Retry",
    "SamplingScorer",
    "Scorer",
    "Scores",
    "Settings",
    "Shuffled",
]
