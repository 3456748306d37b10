"""Evaluate two scripted models with inspect_ai, offline, and keep its own logs."""

import math
import sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import generate

LONG = "Think about it for as long as you need to, and remember that the answer is a number. " * 3


def output(question, skill, usual):
    """An answer that is wrong for some questions, with the logprobs of its token."""
    number = int(question.split()[-1])
    sure = 0.99 if number % usual else 0.55
    text = str(2 * number if number % usual else 2 * number + 1)
    logprobs = Logprobs(content=[Logprob(token=text, logprob=math.log(sure))])
    choice = ChatCompletionChoice(message=ChatMessageAssistant(content=text), stop_reason="stop", logprobs=logprobs)
    return ModelOutput(
        model=skill, choices=[choice], usage=ModelUsage(input_tokens=40, output_tokens=1, total_tokens=41)
    )


def model(name, usual):
    def answer(messages, tools, tool_choice, config):
        return output(messages[-1].text, name, usual)

    return get_model(f"mockllm/{name}", custom_outputs=answer)


def main(folder, count):
    samples = [
        Sample(id=k, input=f"{LONG}What is twice {k}", target=str(2 * k), metadata={"parity": k % 2})
        for k in range(1, count + 1)
    ]
    task = Task(dataset=MemoryDataset(samples), solver=generate(), scorer=match(), name="doubles")
    for name, usual, epochs in (("small", 4, 2), ("large", 10**6, 1)):
        [log] = eval(task, model=model(name, usual), log_dir=str(folder / name), display="none", epochs=epochs)
        assert log.status == "success", log.error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
