"""Write docs/compare.md: decision rules of the field on three recorded logs, as `arbitrage compare` measures them.

    make bench-compare LOGS=FOLDER

FOLDER holds the recorded logs; only science.parquet comes with the package. The Make target gives MAPIE an environment of
its own, and its conformal risk control is then one of the rules.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from benchmarks.mapie_rule import mapie_rule

from conformal_arbitrage import RuleComparison, ScoreLog, compare
from conformal_arbitrage.evaluation.compare import RULES

PAGE = Path(__file__).parent.parent / "docs" / "compare.md"
ALPHA = "0.05"
INTRODUCTION = """# Compared with other rules

Which decision rule asks the Guardian least, among those that keep the budget? `arbitrage compare` runs the rules of the
field and ours on your own log: the same calibration rows, the same test rows, the same scores.

    arbitrage compare log.parquet --alpha 0.05 --splits 200 --plot compare.png

"Like" means their decision rule on our score, not their code, and not the score that their authors would have trained.
The tables below were made by `make bench-compare`: {splits} random splits, {n} rows to calibrate on, alpha
{alpha}. An asterisk marks a mean loss above alpha by more than three standard errors.

The claim that stands: **among the rules that promise the loss, none asks the Guardian less than ours.** Rules that ask
less often break the budget on at least one of the logs; C3PO-like is the exception, since it takes its share from our
rule and then bounds the share, not the loss. The conformal gate and CSE promise more, that this one threshold holds with
probability 0.9, and pay for it with more questions to the Guardian. Splits of one log share rows, so the means over
splits of a small log, such as TruthfulQA, are less certain than their standard errors say.

CRC on a grid is run twice: by our own lines, and by MAPIE's package ; that the two agree is a check on both.
"""


def logs(folder: Path) -> dict[str, tuple[ScoreLog, int | None]]:
    """Return the logs to compare on, with the size of their menus where it is fixed."""
    return {
        "claude-3-sonnet to deepseek-chat, MMLU (14,042 questions)": (
            ScoreLog.read(folder / "mmlu-claude3sonnet-deepseek.parquet").binarized(),
            4,
        ),
        "Qwen2.5-Coder-1.5B to an expert, science (2,369 questions)": (
            ScoreLog.read(folder / "science.parquet", primary="qwen15b", guardian="expert").binarized(),
            None,
        ),
        "gpt-3.5-turbo to gpt-4-turbo, TruthfulQA (817 questions)": (
            ScoreLog.read(folder / "truthfulqa-gpt35-gpt4turbo.parquet"),
            None,
        ),
    }


def section(name: str, comparison: RuleComparison) -> str:
    """Return one log's table in Markdown."""
    header, rows = comparison.table()
    lines = [header, ["---"] * len(header), *rows]
    return f"## {name}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Compare on every log and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--mapie", help="a Python that has MAPIE; left out without it")
    options = parser.parse_args()
    sections: list[str] = []
    comparison: RuleComparison | None = None
    with nullcontext() if options.mapie is None else mapie_rule(options.mapie) as theirs:
        rules = RULES if theirs is None else (*RULES, theirs)
        for name, (log, size) in logs(options.logs).items():
            print(name, file=sys.stderr)
            comparison = compare(log, [ALPHA], splits=options.splits, menu_size=size, rules=rules)
            sections.append(section(name, comparison))
    assert comparison is not None
    promises = "## What each rule promises\n\n" + "\n".join(f"- {line}" for line in comparison.promises()) + "\n"
    text = INTRODUCTION.format(splits=options.splits, n=comparison.calibration_size, alpha=ALPHA)
    PAGE.write_text("\n".join([text, *sections, promises]), encoding="utf-8")


if __name__ == "__main__":
    main()
