"""Learned scores on recorded logs: Guardian shares against the margin's, live decisions against a replay, and their time.

    python -m benchmarks.learned LOGS [--splits 100] [--replay | --text]

LOGS is the folder with the recorded logs; only science.parquet comes with the package. `--replay` decides every row of
every log twice, in a replay and as a live policy would, and counts differences. `--text` compares learning from texts with
learning without, on the logs that have them (extra `text`).
"""

import argparse
import time
from pathlib import Path

import numpy as np

from conformal_arbitrage import Certificate, Features, ScoreLog, calibrate, evaluate

ALPHAS = (0.02, 0.05, 0.1)
KEY = b"the same for every benchmark here"
LOGS: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
    "claude": ("mmlu-claude3sonnet-deepseek", 4, (400, 2000)),
    "science": ("science", None, (400, 1895)),
    "judge": ("judge-pairs-mistral7b-gpt4", None, (300,)),
    "sciq": ("sciq-llama8b-gpt4o", None, (400,)),
    "tqa": ("truthfulqa-gpt35-gpt4turbo", None, (400,)),
    "llama13b": ("mmlu-llama13b-gpt4", 4, (400,)),
}
TARGETS = {
    ("claude", 400): (0.65, 0.355, 0.18), ("claude", 2000): (0.55, 0.33, 0.155), ("science", 400): (0.615, 0.455, 0.31),
    ("science", 1895): (0.60, 0.44, 0.29), ("judge", 300): (0.40, 0.18, 0.01), ("sciq", 400): (0.505, 0.11, 0.005),
    ("tqa", 400): (0.762, 0.634, 0.46), ("llama13b", 400): (0.877, 0.779, 0.659),
}  # fmt: skip


def read(folder: Path, name: str) -> ScoreLog:
    """Return a recorded log with losses of 0 or 1."""
    roles = {"primary": "qwen15b", "guardian": "expert"} if name == "science" else {}
    log = ScoreLog.read(folder / f"{name}.parquet", **roles)
    return log if log.is_router else log.binarized()


def shares(log: ScoreLog, n: int, size: int | None, splits: int) -> list[tuple[float, float, float, float]]:
    """Return, for each alpha, the shares of margin and auto, the loss of auto and its standard error."""
    options = {"calibration_size": n, "test_size": min(2000, len(log) - n), "trials": splits, "boundary": "random"}
    margin = evaluate(log, ALPHAS, **options).of("conformal")
    auto = evaluate(log, ALPHAS, score="auto", features=Features(menu_size=size), **options).of("conformal")
    return [
        (one.mean("deferred"), two.mean("deferred"), two.mean("loss"), two.summary("loss")["std"] / splits**0.5)
        for one, two in zip(margin, auto, strict=True)
    ]


def text_shares(log: ScoreLog, n: int, splits: int) -> list[tuple[float, float, float, float]]:
    """Return, for each alpha, the shares of auto without texts and with them, the loss with them and its standard error."""
    options = {"calibration_size": n, "trials": splits, "boundary": "random", "score": "auto"}
    without, texts = (
        evaluate(log, ALPHAS, features=Features(text=text), **options).of("conformal") for text in (False, True)
    )
    return [
        (one.mean("deferred"), two.mean("deferred"), two.mean("loss"), two.summary("loss")["std"] / splits**0.5)
        for one, two in zip(without, texts, strict=True)
    ]


def replay(log: ScoreLog, certificate: Certificate) -> tuple[int, float]:
    """Return how many rows a live decision decides otherwise than a replay, and microseconds of a live one."""
    replayed, different = list(certificate.apply(log)), 0
    tokens = log.primary_usage.output_tokens
    rows = [(log.row(k).primary.tolist(), str(log.id[k]), log.row(k).group) for k in range(len(log))]
    start = time.perf_counter()
    for k, (scores, name, group) in enumerate(rows):
        length = None if tokens is None else float(tokens[k])
        candidates, margin, use = certificate.sight(scores, id=name, group=group, tokens=length)
        different += (tuple(candidates), margin, use) != (
            replayed[k].candidates, replayed[k].margin, replayed[k].learned,
        )  # fmt: skip
    return different, 1e6 * (time.perf_counter() - start) / len(rows)


def main() -> None:
    """Print a table of shares or of replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args()
    ratios: list[float] = []
    for short, (name, size, sizes) in LOGS.items():
        log = read(options.logs, name)
        if options.text:
            for alpha, found in zip(
                ALPHAS, text_shares(log, sizes[0], options.splits) if log.context is not None else (), strict=False
            ):
                without, texts, loss, error = found
                print(
                    f"{short:9} n = {sizes[0]:5}, alpha {alpha:4}: auto {without:.3f}, with texts {texts:.3f} "
                    f"({texts / without if without else 1:.2f}); loss {loss:.4f} +- {error:.4f}",
                    flush=True,
                )
            continue
        for n in sizes:
            if options.replay:
                part = log.select(np.random.default_rng(0).permutation(len(log))[:n])
                certificate = calibrate(
                    part, 0.05, boundary="random", key=KEY, score="auto", features=Features(menu_size=size)
                )  # fmt: skip
                different, taken = replay(log, certificate)
                print(
                    f"{short:9} n = {n:5}: {different} of {len(log)} rows differ, {taken:.0f} us a decision", flush=True
                )
                continue
            for alpha, target, found in zip(
                ALPHAS, TARGETS[short, n], shares(log, n, size, options.splits), strict=True
            ):
                margin, auto, loss, error = found
                ratio = auto / margin if margin else 1.0
                ratios += [ratio] if n <= 400 else []
                kept = "kept" if loss <= alpha + 4 * error else "BROKEN"
                met = "met" if auto <= target + 5e-4 else "missed"
                print(
                    f"{short:9} n = {n:5}, alpha {alpha:4}: margin {margin:.3f}, auto {auto:.3f} ({ratio:.2f}), "
                    f"target {target:.3f} {met}; loss {loss:.4f} +- {error:.4f}, quota {kept}",
                    flush=True,
                )
    if ratios:
        print(
            f"largest ratio {max(ratios):.3f} (at most 1.08), mean {np.mean(ratios):.3f} (at most 1.00), up to 400 rows"
        )


if __name__ == "__main__":
    main()
