"""Ask two models on this machine through LiteLLM, and write the payloads that its loggers get."""

import json
import math
import os
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no prices from the network

import litellm
from litellm.integrations.custom_logger import CustomLogger

payloads = []


class Keeper(CustomLogger):
    """A logger as its S3 and GCS loggers are: it takes the standard logging payload."""

    def log_success_event(self, kwargs, response_obj, start_time, end_time):
        payloads.append(kwargs["standard_logging_object"])

    def log_failure_event(self, kwargs, response_obj, start_time, end_time):
        payloads.append(kwargs["standard_logging_object"])


class Model(BaseHTTPRequestHandler):
    """An endpoint whose small model is wrong, and unsure, about every third question, and fails on the fifth."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["messages"][-1]["content"].split()[-1])
        small = body["model"] == "small"
        if small and number == 5:
            self.send_error(400, "no")
            return
        wrong = small and number % 3 == 0
        text = str(2 * number + wrong)
        logprobs = {
            "content": [{"token": text, "logprob": math.log(0.5 if wrong else 0.95), "bytes": None, "top_logprobs": []}]
        }
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "logprobs": logprobs,
        }
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        reply = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def main(folder, count):
    server = HTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    litellm.callbacks = [Keeper()]
    router = litellm.Router(
        model_list=[
            {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "none", "num_retries": 0,
             "api_base": f"http://127.0.0.1:{server.server_port}/v1"}} for name in ("small", "large")
        ],
        num_retries=0,
    )  # fmt: skip
    for number in range(count):
        for model in ("small", "large"):
            asked = [{"role": "user", "content": f"What is twice {number}"}]
            with suppress(litellm.BadRequestError):
                router.completion(model=model, messages=asked, logprobs=True)
    for thread in threading.enumerate():  # loggers run on threads of their own
        if "ThreadPoolExecutor" in thread.name:
            thread.join(timeout=0.1)
    wait = threading.Event()
    for _ in range(100):
        if len(payloads) >= 2 * count:
            break
        wait.wait(0.1)
    server.shutdown()
    (folder / "calls.jsonl").write_text("".join(json.dumps(one, default=str) + "\n" for one in payloads))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
