"""Route questions through LiteLLM's own router by forecasts of a scripted classifier, and write what it did.

With a folder and a count: routed and direct calls of both models, as its loggers get them, into calls.jsonl. With a
complexity_router_config as JSON, too: the model that answered each question under that setting, into routed.json.
"""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from make_litellm import Keeper, litellm, payloads

SOLVERS = {"efficient_profile": "small", "capable_profile": "large", "harness": "none"}


def forecast(number):
    """The chances of both models, in hundredths, as a classifier would state them."""
    return 37 * number % 97 / 100, (37 * number % 97 + 61 * number % 71) % 101 / 100


class Kept(Keeper):
    """The same logger for asynchronous calls."""

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        payloads.append(kwargs["standard_logging_object"])


class Models(BaseHTTPRequestHandler):
    """An endpoint with a classifier, a large model that is right, and a small one that is wrong where the gap is large."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(json.dumps(body["messages"][-1]["content"]).split("question ")[1].split("?")[0])
        efficient, capable = forecast(number)
        text = "right" if body["model"] == "large" or capable - efficient < 0.2 + number % 7 / 10 else "wrong"
        if body["model"] == "judge":
            chances = {
                name: {"likely_failure": "none", "p_solve": p}
                for name, p in (("efficient", efficient), ("capable", capable))
            }
            demands = {"reasoning": "routine", "scope": "localized", "specification": "clear"}
            verdict = {"crux": "it", "demands": demands, "verification": "relevant", "forecasts": chances}
            text = json.dumps(verdict)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        data = json.dumps({**reply, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


async def ask(folder, count, port, setting):
    own = {"classifier_type": "llm_v2", "classifier_llm_config": {"model": "judge"}}
    own["tiers"] = {"SIMPLE": "small", "REASONING": "large"}
    gap = (setting or {}).get("llm_v2_config", {"max_quality_gap": 0.3})
    own["llm_v2_config"] = {**SOLVERS, **gap}
    models = [
        {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "none", "num_retries": 0,
         "api_base": f"http://127.0.0.1:{port}/v1"}} for name in ("small", "large", "judge")
    ]  # fmt: skip
    models.append({"model_name": "smart", "litellm_params": {"model": "auto_router/complexity_router",
                   "complexity_router_config": own}})  # fmt: skip
    router = litellm.Router(model_list=models, num_retries=0)
    routed = []
    for number in range(count):
        asked = [{"role": "user", "content": f"This is question {number}?"}]
        routed.append((await router.acompletion(model="smart", messages=asked)).model)
        for model in () if setting else ("small", "large"):
            await router.acompletion(model=model, messages=asked)
    if setting:
        (folder / "routed.json").write_text(json.dumps(routed))
        return
    for _ in range(300):
        if len(payloads) >= 4 * count:  # the classifier's call, the routed one, and both models'
            break
        await asyncio.sleep(0.1)
    (folder / "calls.jsonl").write_text("".join(json.dumps(one, default=str) + "\n" for one in payloads))


def main(folder, count, setting=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    litellm.callbacks = [Kept()]
    asyncio.run(ask(folder, count, server.server_port, setting))
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:]))
