"""SmolLM2 behind the OpenAI-compatible server of xllamacpp, on a free loopback port, until standard input closes."""

import sys

import xllamacpp

from conformal_arbitrage.models.others import smollm2_weights

params = xllamacpp.CommonParams()
params.model.path = str(smollm2_weights())
params.model_alias = {"smollm2-135m"}
params.n_ctx = 8192
params.n_parallel = 4
params.hostnames = ["127.0.0.1"]
params.port = 0
params.verbosity = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
