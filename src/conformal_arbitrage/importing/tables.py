"""Tables: RouteLLM's win rates with graded answers, and plain tables with one column per option.

Knows nothing of how the scores in them were made.
"""

from collections.abc import Sequence
from pathlib import Path

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.importing.pairing import Imported, Tally, counted
from conformal_arbitrage.scorelog.files import Table
from conformal_arbitrage.scorelog.log import ScoreLog

_WIN_RATES = ("strong_win_rates", "strong_win_rate", "win_rate", "mf", "bert", "causal_llm", "sw_ranking", "random")
_KEPT = ("id", "group", "context")


def read_routellm(path: str | Path, *, weak: str, strong: str, win_rate: str | None = None) -> Imported:
    """Read RouteLLM's win rates and the grades of both models' answers as a score log in router form.

    RouteLLM asks the strong model if the win rate is at least its threshold, so 1 - win rate is the confidence in the weak
    one, and the certified threshold for RouteLLM is 1 - relaxation.

    Args:
        path: the table, such as a file of its evaluations: one row per prompt.
        weak: the column with the grade of the weak model's answer (the Primary), in [0, 1] or true and false.
        strong: the same for the strong model (the Guardian).
        win_rate: the column with the router's win rate of the strong model, in [0, 1]; found by its usual names.
    """
    with Table(path) as table:
        name = win_rate or next((one for one in _WIN_RATES if one in table.types), None)
        for one in (name, weak, strong):
            if one is None or one not in table.types:
                wanted = "win rate: name it with --win-rate" if one is None else f"column '{one}'"
                raise ScoreLogError(f"{path}: there is no {wanted}; it has {', '.join(sorted(table.types))}")
        rates = table.scalars(str(name))
        _refuse_outside(path, str(name), rates)
        texts = {one: table.texts(one).tolist() for one in _KEPT if one in table.types}
        if "context" not in texts and "prompt" in table.types:
            texts["context"] = table.texts("prompt").tolist()
        unused = Tally()
        for one in table.types:
            if one not in (name, weak, strong, "prompt", *_KEPT):
                unused.add("columns", one)
        grades = [table.scalars(one, truths=True) for one in (weak, strong)]
    log = ScoreLog.from_router(confidence=1 - rates, primary_grade=grades[0], guardian_grade=grades[1], **texts)
    note = "RouteLLM's threshold is 1 - relaxation: `router-NAME-THRESHOLD`, rounded down if it is rounded"
    return Imported(log=log, source="routellm", models=(weak, strong), unused=unused, notes=(note, *counted(log)))


def _refuse_outside(path: str | Path, name: str, rates: Floats) -> None:
    outside = (rates < 0) | (rates > 1)
    if outside.any():
        row = int(outside.argmax())
        raise ScoreLogError(f"{path}: row {row + 1}, column '{name}': a win rate is from 0 to 1, not {rates[row]:g}")


def read_wide(
    path: str | Path, *, primary: Sequence[str], guardian: Sequence[str], outcomes: Sequence[str] = ()
) -> Imported:
    """Read a table with one column per option and model, such as p_yes, p_no, g_yes, g_no, as a score log of menus.

    Args:
        path: .csv, .parquet, .jsonl or .jsonl.gz.
        primary: the Primary's columns, one per option, in the order of the options.
        guardian: the Guardian's columns, in the same order.
        outcomes: list columns to report besides `correct`.
    """
    with Table(path) as table:
        for name in (*primary, *guardian):
            if name not in table.types:
                raise ScoreLogError(
                    f"{path}: there is no column '{name}'; it has {', '.join(sorted(table.types))}; name one column per "
                    "option with --primary and --guardian, separated by commas"
                )
    log = ScoreLog.read(path, primary=primary, guardian=guardian, outcomes=outcomes)
    unused = Tally()
    for name in log.extra:
        unused.add("columns (kept as they are)", name)
    names = ", ".join(primary), ", ".join(guardian)
    return Imported(log=log, source="table", models=names, unused=unused, notes=counted_menus(log))


def counted_menus(log: ScoreLog) -> tuple[str, ...]:
    """Return what rows without scores mean for calibration."""
    return tuple(note.replace("no confidence of the Primary", "no scores of the Primary") for note in counted(log))
