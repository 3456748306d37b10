"""Write what Langfuse's API answers, with the types of its own package."""

import datetime as dt
import json
import sys
from pathlib import Path

from langfuse.api import GetScoresV3Response, ObservationsV2Response
from langfuse.api.core.pydantic_utilities import parse_obj_as


def observation(id, model, number):
    right = model == "large" or number % 3
    return {
        "id": id,
        "traceId": f"trace-{id}",
        "startTime": dt.datetime(2026, 11, 16, 0, number, tzinfo=dt.UTC),
        "projectId": "p",
        "type": "GENERATION",
        "model": model,
        "input": [{"role": "user", "content": f"What is twice {number}"}],
        "output": {"role": "assistant", "content": str(2 * number + (not right))},
        "metadata": {"confidence": 0.9 if number % 3 else 0.4},
        "usageDetails": {"input": 10, "output": 1, "total": 11},
        "costDetails": {"total": 0.001 if model == "small" else 0.01},
        "level": "DEFAULT",
    }


def score(observation):
    number = int(observation["input"][0]["content"].split()[-1])
    return {
        "id": f"score-{observation['id']}",
        "projectId": "p",
        "name": "correctness",
        "value": float(observation["output"]["content"] == str(2 * number)),
        "dataType": "NUMERIC",
        "source": "EVAL",
        "timestamp": observation["startTime"],
        "createdAt": observation["startTime"],
        "updatedAt": observation["startTime"],
        "environment": "default",
        "subject": {"kind": "observation", "id": observation["id"], "traceId": observation["traceId"]},
    }


def main(folder, count):
    observations = [observation(f"{model}-{k}", model, k) for model in ("small", "large") for k in range(count)]
    pages = {
        "observations": parse_obj_as(ObservationsV2Response, {"data": observations, "meta": {}}),
        "scores": parse_obj_as(GetScoresV3Response, {"data": list(map(score, observations)), "meta": {"limit": count}}),
    }
    for name, page in pages.items():
        (folder / f"{name}.json").write_text(page.json())
        json.loads((folder / f"{name}.json").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
