"""Run lm-evaluation-harness twice, offline, over a task with options and one that generates text; write its own files."""

import hashlib
import json
import random
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

COLORS = ["red", "green", "light blue", "black"]
TASKS = {
    "colors": """
task: colors
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "sums": """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{number}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: true, temperature: 1.0}}
repeats: 4
metric_list: [{{metric: exact_match}}]
""",
}


class Scripted(LM):
    """A model that knows the answer with some probability."""

    def __init__(self, name, skill):
        super().__init__()
        self.name, self.skill = name, skill
        self.calls = 0

    def _draw(self, *texts):
        digest = hashlib.sha256(json.dumps([self.name, self.calls, *texts]).encode()).hexdigest()
        return random.Random(digest).random()

    def loglikelihood(self, requests, disable_tqdm=False):
        results = []
        for request in requests:
            context, continuation = request.arguments
            right = continuation.strip() == COLORS[int(context.split()[-1]) % 4]
            results.append((-4 * self._draw(context, continuation) + (3 * self.skill if right else 0) - 3, False))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        results = []
        for request in requests:
            self.calls += 1
            number = int(request.arguments[0].split()[-1])
            results.append(str(number + (self._draw(request.arguments[0]) > self.skill)))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def main(folder, count):
    docs = [
        {"question": f"Which color is number {k}", "choices": COLORS, "answer": k % 4, "number": str(k)}
        for k in range(count)
    ]
    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text.format(file=file))
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    for name, skill in (("small", 0.6), ("large", 0.95)):
        tracker = EvaluationTracker(output_path=str(folder / name / "results.json"))
        results = lm_eval.simple_evaluate(
            model=Scripted(name, skill), tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=task, samples=rows)
        accuracy = {task: results["results"][task] for task in TASKS}
        (folder / f"{name}.json").write_text(json.dumps(accuracy, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
