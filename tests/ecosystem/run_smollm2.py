"""Run lm-evaluation-harness on SmolLM2 behind a local endpoint, with two prompts; its per-sample files stay.

    .venv-evaluations/bin/python tests/ecosystem/run_smollm2.py URL FOLDER

The bare prompt is the Primary's, the one with worked examples the Guardian's. Runs without this package.
"""

import json
import sys
import urllib.request
from functools import cache
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

TASK = """
task: everyday
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{{column}}}}}"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


class Letters(LM):
    """The log-probability of an answer letter as the first token of a chat reply."""

    def __init__(self, url):
        super().__init__()
        self.url = url
        self.listed = cache(self._listed)

    def _listed(self, context):
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": context}], "max_tokens": 1,
                "temperature": 0, "logprobs": True, "top_logprobs": 20}  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            [token] = json.load(reply)["choices"][0]["logprobs"]["content"]
        return {entry["token"].strip(): entry["logprob"] for entry in reversed(token["top_logprobs"])}

    def loglikelihood(self, requests, disable_tqdm=False):
        results = []
        for request in requests:
            context, letter = request.arguments
            listed = self.listed(context)
            results.append((listed.get(letter.strip(), min(listed.values()) - 1), False))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def main(url, folder):
    for column, name in (("bare", "primary"), ("worked", "guardian")):
        tasks = folder / f"tasks-{name}"
        tasks.mkdir()
        (tasks / "everyday.yaml").write_text(TASK.format(file=folder / "docs.jsonl", column=column))
        tracker = EvaluationTracker(output_path=str(folder / name / "results.json"))
        results = lm_eval.simple_evaluate(
            model=Letters(url), tasks=["everyday"], log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        )  # fmt: skip
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        tracker.save_results_samples(task_name="everyday", samples=samples["everyday"])
        print(name, "acc", results["results"]["everyday"]["acc,none"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
