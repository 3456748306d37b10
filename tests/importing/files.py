"""Files as other tools write them, small enough to read."""

import json
import math
import zipfile


def write_lines(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return path


def sample(doc_id, likelihoods, target, *, options=("red", "green", "blue"), **more):
    """A line of lm-eval's samples file for a task with options; its numbers are texts there."""
    top = max(range(len(likelihoods)), key=lambda k: likelihoods[k] or 0)
    return {
        "doc_id": doc_id,
        "doc": {"q": f"Q{doc_id}"},
        "target": str(target),
        "arguments": {f"gen_args_{k}": {"arg_0": f"Q{doc_id}", "arg_1": f" {text}"} for k, text in enumerate(options)},
        "resps": [[[str(value), "False"]] for value in likelihoods],
        "filtered_resps": [[str(value), "False"] for value in likelihoods],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"hash{doc_id}",
        "acc": float(str(top) == str(target)),
    } | more


def generation(doc_id, texts, metrics, *, target="4", filter="none", filtered=None):
    """A line of lm-eval's samples file for a task that generates text, perhaps several times."""
    return {
        "doc_id": doc_id,
        "doc": {},
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": f"Q{doc_id}", "arg_1": {"until": ["\n"]}}},
        "resps": [list(texts)],
        "filtered_resps": [texts[0] if filtered is None else filtered],
        "filter": filter,
        "metrics": list(metrics),
        "doc_hash": f"hash{doc_id}",
    } | metrics


def tokens(*probabilities):
    """The logprobs of a reply."""
    return {"content": [{"token": "x", "logprob": math.log(p)} for p in probabilities]}


def completion(text, *probabilities, model="small"):
    """A chat completion."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    if probabilities:
        choice["logprobs"] = tokens(*probabilities)
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    return {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}


def batch_line(custom_id, text, *probabilities, model="small"):
    """A line of the output file of a batch."""
    body = completion(text, *probabilities, model=model)
    return {
        "id": f"b{custom_id}",
        "custom_id": custom_id,
        "error": None,
        "response": {"status_code": 200, "body": body},
    }


def inspect_sample(id, text, value, *probabilities, epoch=1, **more):
    """A sample of an inspect_ai log."""
    choice = {"message": {"role": "assistant", "content": text}, "stop_reason": "stop"}
    if probabilities:
        choice["logprobs"] = tokens(*probabilities)
    return {
        "id": id,
        "epoch": epoch,
        "input": f"Q{id}",
        "target": "4",
        "output": {"model": "m", "choices": [choice], "completion": text},
        "scores": {"match": {"value": value, "answer": text}},
        "model_usage": {"m": {"input_tokens": 7, "input_tokens_cache_read": 3, "output_tokens": 2}},
    } | more


def write_eval(path, samples, *, model="m", task="sums", status="success"):
    """A log of inspect_ai as a ZIP archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        header = {"version": 2, "status": status, "eval": {"model": model, "task": task}}
        archive.writestr("header.json", json.dumps(header))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
    return path
