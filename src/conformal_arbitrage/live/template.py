"""The configuration that `arbitrage init` writes.

Knows nothing of how a configuration is read.
"""

from conformal_arbitrage.scorers.kinds import Form

_TEMPLATE = """\
# Conformal Arbitrage. Next: `arbitrage check`, `arbitrage collect`, `arbitrage calibrate`, `arbitrage ask`.
# For production: `arbitrage calibrate log.parquet --confidence 0.95`. The certificate then promises its own long-run
# loss, so that the monitor's alarm stands at alpha itself; it takes some more calls of the Guardian.
alpha = 0.05             # on average at most 5 points worse than always asking the Guardian
guardian_sees = "all"    # a deferral shows the Guardian every option; calibrated on that loss

[task]
form = "{form}"            # "menu": choose from options; "text": free text and tool calls
{settings}# {safe} = "..."    # fallback if the Guardian fails; without it that is an error

[primary]                # cheap or helpful: does most of the work
kind = "chat"            # or decisions, logprob, sampling, function, replay, human, local
url = "https://api.openai.com/v1"    # any OpenAI-compatible endpoint, such as http://localhost:11434/v1
model = "gpt-5.4-nano"
key_env = "OPENAI_API_KEY"           # the environment variable with the key; leave out if none is needed
{confidence}# temperature = "default"            # for models that take none; the paper's is 0.1
# max_tokens = 2000                  # for models that reason before they answer

[guardian]               # careful or safe: steps in when it matters
kind = "chat"
url = "https://api.openai.com/v1"
model = "gpt-5.4"
key_env = "OPENAI_API_KEY"
"""


_SETTINGS = """\
settings = "as requested"  # requests keep their temperature, limits, stop; "pinned": those below, others are refused
"""
_CONFIDENCE = """\
confidence = "ask"                   # a second short call rates the answer; or "logprob", from the same call
"""


def template(form: Form) -> str:
    """Return a short commented configuration to start from."""
    menu = form == "menu"
    return _TEMPLATE.format(
        form=form,
        settings="" if menu else _SETTINGS,
        safe="safe_action" if menu else "safe_answer",
        confidence="" if menu else _CONFIDENCE,
    )
