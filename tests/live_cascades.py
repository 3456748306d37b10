"""A scripted upstream with three models of a cascade, and the configuration that names them."""

import json
import random
import re

from tests.scripted import completion

MENU = ("yes", "no", "maybe")
NAMES = ("small", "middle", "large")
PRICES = {"small": [1.0, 1.0], "middle": [5.0, 5.0], "large": [50.0, 50.0]}
SKILLS = {"small": 0.65, "middle": 0.8, "large": 0.97}


def facts(model, question):
    """Return what a model says to a question and how sure it is, the same each time it is asked."""
    easy = random.Random(question).random()
    rng = random.Random(f"{model} {question}")
    right = rng.random() < SKILLS[model] + 0.5 * (easy - 0.5)
    sure = round(min(1.0, 0.5 * easy + 0.3 * right + 0.2 * rng.random()), 2)
    return ("yes" if right else rng.choice(["no", "maybe"])), sure


def question_in(body):
    """Return the question of a request: q and a number."""
    match = re.search(r"\bq\d+\b", json.dumps(body["messages"]))
    return "q0" if match is None else match[0]


def reply(path, body, number):
    """Answer as the model that is asked; a menu is scored, a rating given, a question answered."""
    model, question, prompt = body["model"], question_in(body), json.dumps(body["messages"])
    answer, sure = facts(model, question)
    if "How sure are you" in prompt:
        return completion(json.dumps({"confidence": sure}), model=model)
    if "maybe" in prompt:
        shares = [(1 + 2 * sure) / 3 if one == answer else (1 - sure) / 3 for one in MENU]  # leads by `sure`
        return completion(json.dumps({"scores": shares}), model=model)
    return completion(answer, model=model)


def write_cascade_config(folder, url, *, form="text", alpha=0.1, policies="", names=NAMES, **task):
    """Write arbitrage.toml with the three models and the cascade."""
    lines = [f"alpha = {alpha}", "[task]", f'form = "{form}"', *(f"{k} = {json.dumps(v)}" for k, v in task.items())]
    for name in NAMES:
        lines += [
            f"[models.{name}]", 'kind = "chat"', f'url = "{url}"', f'model = "{name}"', f"price = {PRICES[name]}",
            "attempts = 1",
            *(['confidence = "ask"'] if form == "text" and name != "large" else []),
            f"[models.{name}.pinned]", 'mode = "plain"',
        ]  # fmt: skip
    lines += ["[cascade]", f"models = {json.dumps(list(names))}", policies]
    (folder / "arbitrage.toml").write_text("\n".join(lines) + "\n")
