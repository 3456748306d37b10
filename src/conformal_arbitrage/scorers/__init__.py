"""Scorers and answerers: prompts and parsers, one module per kind, listed in `registry`."""

from conformal_arbitrage.scorers.answers import ChatAnswerer
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores, StreamingAnswerer
from conformal_arbitrage.scorers.chat import ChatConfig, ChatScorer
from conformal_arbitrage.scorers.completions import Settings
from conformal_arbitrage.scorers.decisions import DecisionsConfig, DecisionsScorer
from conformal_arbitrage.scorers.function import FunctionConfig, FunctionScorer
from conformal_arbitrage.scorers.human import HumanConfig, HumanScorer
from conformal_arbitrage.scorers.kinds import BuildContext, ChatEndpointConfig, EndpointConfig, ModelConfig, Pinned
from conformal_arbitrage.scorers.local import LocalConfig, LocalModel, LocalScorer
from conformal_arbitrage.scorers.logprob import LogprobConfig, LogprobScorer
from conformal_arbitrage.scorers.order import Shuffled
from conformal_arbitrage.scorers.prompts import Confidences, PairPrompt, Prompt
from conformal_arbitrage.scorers.replay import ReplayConfig, ReplayScorer
from conformal_arbitrage.scorers.sampling import SamplingConfig, SamplingScorer

__all__ = [
    "Answer",
    "Answerer",
    "BuildContext",
    "ChatAnswerer",
    "ChatConfig",
    "ChatEndpointConfig",
    "ChatScorer",
    "Confidences",
    "DecisionsConfig",
    "DecisionsScorer",
    "EndpointConfig",
    "FunctionConfig",
    "FunctionScorer",
    "HumanConfig",
    "HumanScorer",
    "Identity",
    "LocalConfig",
    "LocalModel",
    "LocalScorer",
    "LogprobConfig",
    "LogprobScorer",
    "ModelConfig",
    "PairPrompt",
    "Pinned",
    "Prompt",
    "ReplayConfig",
    "ReplayScorer",
    "SamplingConfig",
    "SamplingScorer",
    "Scorer",
    "Scores",
    "Settings",
    "Shuffled",
    "StreamingAnswerer",
]
