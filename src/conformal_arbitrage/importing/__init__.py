"""Importers: score logs from the files that evaluation and observability tools already write."""

from conformal_arbitrage.importing.files import read_routellm, read_wide
from conformal_arbitrage.importing.inspect_eval import read_inspect
from conformal_arbitrage.importing.langfuse_export import read_langfuse
from conformal_arbitrage.importing.lm_eval_samples import read_lm_eval
from conformal_arbitrage.importing.openai_batch import read_openai_batch
from conformal_arbitrage.importing.pairing import Imported
from conformal_arbitrage.importing.routers import RouterSetting, read_litellm, read_vllm_sr, router_setting

__all__ = [
    "Imported",
    "RouterSetting",
    "read_inspect",
    "read_langfuse",
    "read_litellm",
    "read_lm_eval",
    "read_openai_batch",
    "read_routellm",
    "read_vllm_sr",
    "read_wide",
    "router_setting",
]
