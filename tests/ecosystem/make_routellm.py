"""Let RouteLLM rate prompts and grade its routing, or route them: `make_routellm.py FOLDER COUNT [THRESHOLD]`.

Its matrix factorization router runs with weights that are drawn here, on embeddings of a server on this machine.
"""

import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

STRONG, WEAK = "gpt-4-1106-preview", "mixtral-8x7b-instruct-v0.1"


class Embeddings(BaseHTTPRequestHandler):
    """Gives every text a vector of its own."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        draw = random.Random(body["input"][0])
        row = {"object": "embedding", "index": 0, "embedding": [draw.gauss(0, 1) for _ in range(1536)]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        reply = json.dumps({"object": "list", "model": body["model"], "data": [row], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        """Say nothing."""


def make(folder, count):
    """Write what an evaluation leaves: one row per prompt, with both models' grades and the win rates."""
    import pandas as pd
    import torch
    from routellm.evals import benchmarks
    from routellm.routers.matrix_factorization.model import MFModel

    torch.manual_seed(3)
    MFModel(dim=128, num_models=64, text_dim=1536, num_classes=1, use_proj=True).save_pretrained(folder / "weights")
    routed = controller(folder)
    draw = random.Random(5)
    rows = []
    for number in range(count):
        prompt = f"What is {number} and {number + 1}?"
        weak_right = draw.random() > routed.routers["mf"].calculate_strong_win_rate(prompt) ** 2
        rows.append({"prompt": prompt, STRONG: True, WEAK: weak_right})
    (folder / "mmlu" / "responses").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(folder / "mmlu" / "responses" / "mmlu_sums.csv", index=False)
    (folder / "mmlu" / "contaminated_prompts.jsonl").write_text('{"eval_prompt": "another"}\n')
    benchmarks.CURRENT_DIR = folder
    mmlu = benchmarks.MMLU(["sums"], routed.model_pair, overwrite_cache=[])
    results = list(mmlu.evaluate(routed, "mf", 10, overwrite_router_cache=True))
    mmlu.all_data.to_csv(folder / "mmlu.csv", index=False)
    (folder / "results.json").write_text(json.dumps([[float(one) for one in result[:2]] for result in results]))


def route(folder, threshold):
    """Write which prompts of the evaluation go to the strong model."""
    import pandas as pd

    routed = controller(folder)
    router, cutoff = routed._parse_model_name(f"router-mf-{threshold}")
    prompts = pd.read_csv(folder / "mmlu.csv")["prompt"]
    strong = [routed.route(prompt, router, cutoff) == STRONG for prompt in prompts]
    (folder / "strong.json").write_text(json.dumps(strong))


def controller(folder):
    """Return RouteLLM's controller over the weights in a folder."""
    from routellm.controller import Controller

    return Controller(["mf"], STRONG, WEAK, config={"mf": {"checkpoint_path": str(folder / "weights")}})


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Embeddings)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1", "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip
    if len(sys.argv) > 3:
        route(Path(sys.argv[1]), sys.argv[3])
    else:
        make(Path(sys.argv[1]), int(sys.argv[2]))
