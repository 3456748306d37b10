"""quickstart: from what someone has to a configuration and the next three commands; read_run: a model's graded answers."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.collecting.questions import choice_lists
from conformal_arbitrage.core.exact import Floats, n_rows
from conformal_arbitrage.core.risk import Number, as_fraction
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.evaluation.inspection import FEWEST_TUNING_ROWS
from conformal_arbitrage.importing.inspect_eval import inspect_run
from conformal_arbitrage.importing.lm_eval_samples import lm_eval_run
from conformal_arbitrage.importing.pairing import LoggedAnswer, ModelRun
from conformal_arbitrage.live.config import template
from conformal_arbitrage.models.kinds import Form
from conformal_arbitrage.scorelog.cascade import GUARDIAN_NAME
from conformal_arbitrage.scorelog.log import read_confidence
from conformal_arbitrage.scorelog.tables import ColumnReader, Table

Have = Literal["csv", "endpoints", "eval"]
CONFIG, LOG, PLAN, CERTIFICATE = "arbitrage.toml", "log.parquet", "route.toml", "certificate.json"
_NOT_SCORES = ("id", "label", "group", "context", "actions", "correct")
_CONFIDENCES = ("confidence", "score", "router_score", "primary_confidence")
_SURE = {"confidence", "conf", "prob", "probability", "logprob", "logprobs", "sure", "certainty"}
"""Words in the name of a confidence that is called otherwise."""
_GRADED = {"grade", "correct", "ok", "right"}
"""Words in the names of grades."""
_NEITHER = {"cost", "price", "tokens", "latency", "seconds", "time", "index"}
"""Words in the names of numbers that are neither."""
_NO_OPTIONS = ("confidence", "correct", "grade")
"""What follows a model's name in columns that are no options."""
_GUARDIANS = {"g", "guardian", "strong", "large", "big", "expert"}
_QUESTIONS = ("prompt", "query", "input", "problem", "instruction", "text")
_OPTION = re.compile(r"(?:option|choice)[ _-]?([a-z]|\d\d?)", re.IGNORECASE)
_CODE = re.compile(r"(?=.*\d)[\w:#/@-]+")
"""An id, where no name says so: one word with a digit, and no fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickStart:
    """Where to start.

    Attributes:
        summary: what the files hold, in a sentence.
        configuration: the text of arbitrage.toml; None where there are no models to ask.
        commands: the next three commands.
    """

    summary: str
    configuration: str | None
    commands: tuple[str, str, str]


def quick_start(have: Have, files: Sequence[str], *, alpha: Number = 0.05, config: str = CONFIG) -> QuickStart:
    """Return the configuration and the next three commands for what someone has.

    Args:
        have: "csv": a table with scores of both models; "endpoints": two models to ask, and questions; "eval": the files
            of two evaluation runs, the Primary's first.
        files: the table, the questions, or the two runs.
        config: the name that the configuration will have.

    Raises:
        OptionError: the files are of another kind, or alpha is not a number.
    """
    budget = float(as_fraction(alpha, name="alpha"))
    if have == "endpoints":
        return _endpoints(files, budget, _naming(config))
    summary, first, ungraded = _from_table(_only(files), budget) if have == "csv" else (*_from_runs(files), 0)
    log = _only(files) if first is None else LOG
    missing = " --missing-guardian worst_case" if ungraded else ""
    recommend = f"arbitrage recommend {_quoted(log)} --alpha {budget:g}{missing} -o {PLAN}"
    show = f"arbitrage certificate show {CERTIFICATE}"
    apply = f"arbitrage apply {CERTIFICATE} {_quoted(log)} -o decisions.jsonl"
    commands = (recommend, show, apply) if first is None else (first, recommend, show)
    return QuickStart(summary=summary, configuration=None, commands=commands)


def _configured(form: Form, alpha: float) -> str:
    """Return the configuration that `init` writes, with this alpha; models matter to live decisions only."""
    points = f"alpha = {alpha!r}             # on average at most {100 * alpha:g} points worse"
    return template(form).replace("alpha = 0.05             # on average at most 5 points worse", points)


def _only(files: Sequence[str]) -> str:
    if len(files) != 1:
        raise OptionError(f"name one table with the scores of both models; got {len(files)} files")
    return files[0]


def _endpoints(files: Sequence[str], alpha: float, named: str) -> QuickStart:
    """Return the start for live models; the questions' columns say whether they are menus."""
    questions = files[0] if files else "questions.csv"
    form: Form = "menu"
    columns, summary = "", "two endpoints; put your questions into questions.csv (question, choices, answer)"
    if files:
        with Table(questions) as table:
            form, columns, held = _asked(table)
            summary = f"{table.rows} questions {held}, and two endpoints{_too_few(table.rows, alpha)}"
    return QuickStart(
        summary=summary,
        configuration=_configured(form, alpha),
        commands=(
            f"arbitrage check{named}",
            f"arbitrage collect {_quoted(questions)}{named} -o {LOG}{columns}",
            f"arbitrage recommend {LOG}{named} -o {PLAN}",
        ),
    )


def _asked(table: Table) -> tuple[Form, str, str]:
    """Return the form of a table's questions, the options that tell `collect` its columns, and what was found."""
    listed = next((name for name in ("choices", "options") if name in table.types), None)
    chosen = [] if listed else _option_columns(table)
    form: Form = "menu" if listed or chosen else "text"
    usual = ("question", "messages") if form == "menu" else ("messages", "question")
    question = next((name for name in (*usual, *_QUESTIONS) if name in table.types), None)
    if question is None:
        raise OptionError(
            f"{table.path}: no column of questions among {', '.join(table.types)}; call one 'question', or name it: "
            "arbitrage collect --question-column COL"
        )
    asked = (
        "" if question == "messages" or (question, form) == ("question", "menu") else f" --question-column {question}"
    )
    if listed:
        choice_lists(table, listed)
        return form, (f" --choices-column {listed}" if listed != "choices" else "") + asked, f"with options ({listed})"
    if chosen:
        return form, f" --choice-columns {_quoted(','.join(chosen))}{asked}", f"with options ({', '.join(chosen)})"
    grade = "exact" if any(name in table.types for name in ("expected", "answer", "label")) else "human"
    return form, f" --grade {grade}{asked}", "in free text"


def _option_columns(table: Table) -> list[str]:
    """Return the columns of options in order: option_a, choice1, ...; or A, B, ... where answers are such letters."""
    keys = {name: match[1].lower() for name in table.types if (match := _OPTION.fullmatch(name))}
    if len(keys) > 1:
        return sorted(keys, key=lambda name: (len(keys[name]), keys[name]))
    letters = {name.upper(): name for name in table.types}
    named = [letters[letter] for letter in takewhile(letters.__contains__, ascii_uppercase)]
    answers = {text.strip().upper() for key in ("answer", "label") if key in table.types for text in table.texts(key)}
    return named if len(named) > 1 and answers & {name.upper() for name in named} else []


def _too_few(rows: int, alpha: float) -> str:
    """Return what to say of a table that `recommend` would refuse; nothing if it has enough rows."""
    fewest = max(rows_needed(alpha), FEWEST_TUNING_ROWS)
    few = f"; {n_rows(rows, 'is', 'are')} too few for alpha {alpha:g}: collect {fewest} or more first"
    return few if rows < fewest else ""


def _from_runs(files: Sequence[str]) -> tuple[str, str]:
    """Return what two runs are, and the command that imports them."""
    if len(files) != 2:
        raise OptionError(f"name two runs, the Primary's first; got {len(files)}")
    kinds = {_run_kind(Path(file)) for file in files}
    if len(kinds) > 1:
        raise OptionError(
            f"{files[0]} and {files[1]} are of different tools ({', '.join(sorted(kinds))}); name two runs of one"
        )
    kind = kinds.pop()
    names = " ".join(map(_quoted, files))
    grade = " --grade exact --expected answers.csv" if kind == "openai-batch" else ""
    return f"two runs of {kind}", f"arbitrage import {kind} {names}{grade} -o {LOG}"


def _run_kind(path: Path) -> str:
    """Return the format of a run."""
    if path.name.endswith(".eval"):
        return "inspect"
    if path.name.startswith("samples_") or (path.is_dir() and any(path.rglob("samples_*.jsonl"))):
        return "lm-eval"
    if path.is_file() and path.name.endswith(".jsonl") and '"custom_id"' in path.read_text(errors="replace")[:4096]:
        return "openai-batch"
    raise OptionError(
        f"{path}: not a run of lm-eval (samples_*.jsonl), a log of inspect_ai (.eval) or an output file of the Batch API; "
        "for other tools see `arbitrage import --help`"
    )


def read_run(path: str | Path, *, grade: str | None = None) -> ModelRun:
    """Read one model's graded answers.

    Args:
        path: a run of lm-eval (a samples file, or a folder with several), a log of inspect_ai (.eval), or a table with `id`
            and a column of grades.
        grade: lm-eval's METRIC or METRIC,FILTER; inspect's score; the table's column.

    Raises:
        ScoreLogError: a file is malformed, or ids repeat.
        OptionError: it is not clear what grades the answers.
    """
    place = Path(path)
    if place.name.endswith(".eval"):
        return inspect_run(place, grade)
    if place.name.startswith("samples_") or place.is_dir():
        return lm_eval_run(place, grade)
    with Table(place) as table:
        graded = [name for name in table.types if _words(name) & _GRADED or name == "score"]
        name = grade or (graded[0] if len(graded) == 1 else None)
        if "id" not in table.types:
            raise OptionError(
                f"{path}: no column id, which pairs the answers (columns {', '.join(table.types)}); call the column that "
                "names the questions id"
            )
        if name not in table.types:
            told = f"no column {name}" if name else "it is not clear which column has the grades"
            raise OptionError(f"{path}: {told} (columns {', '.join(table.types)}); name the grades with --grade")
        _refuse_repeated_ids(table, str(path))
        ids, values = table.texts("id").tolist(), table.scalars(name, truths=True).tolist()
    if not all(ids):
        raise ScoreLogError(
            f"{path}: row {ids.index('') + 1} has no id, which pairs the answers; give each question its id"
        )
    grades = [None if np.isnan(value) else value for value in values]
    return ModelRun(
        model=str(path),
        answers={id: LoggedAnswer(id=id, grade=value) for id, value in zip(ids, grades, strict=True)},
    )


def read_two_grades(path: str | Path, old: str, new: str) -> tuple[Floats, Floats]:
    """Read the grades of two models from two columns of one table.

    Raises:
        ScoreLogError: the table is malformed.
        OptionError: it lacks a column, or its ids repeat, whatever the case of that column's name.
    """
    with Table(path) as table:
        for option, name in (("--old", old), ("--new", new)):
            if name not in table.types:
                raise OptionError(
                    f"{path}: no column {name} (columns {', '.join(table.types)}); name one with {option}"
                )
        for name in table.types:
            if name.lower() == "id":
                _refuse_repeated_ids(table, str(path), name)
        return table.scalars(old, truths=True), table.scalars(new, truths=True)


def _from_table(path: str, alpha: float) -> tuple[str, str | None, int]:
    """Return what a table holds, the command that turns it into a score log (None if it is one), and rows without grades.

    Raises:
        OptionError: it cannot be a score log, whatever its columns are called.
    """
    with Table(path) as table:
        names = [name for name in table.types if name not in _NOT_SCORES]
        lists = [name for name in names if table.numbers_if_any(name) is not None]
        router = _router_columns(table, names)
        converted = read_confidence(table, router[0])[1] if router else None
        ungraded = np.zeros(table.rows, bool) if router is None else _lacks(table, router[1]) | _lacks(table, router[2])
        id = _id_column(table, [name for name in names if name not in (router or ())])
        few = _too_few(table.rows, alpha)
        _refuse_repeated_ids(table, path)
        _refuse_grades(table, names, router)
    if len(lists) > 1:
        return f"a score log of {', '.join(lists)}{few}", None, 0
    wide = _wide_pair(names)
    if wide is not None:
        primary, guardian = (",".join(columns) for columns in wide)
        columns = f"--primary {_quoted(primary)} --guardian {_quoted(guardian)}"
        return (
            f"one column per option, {primary} and {guardian}{few}",
            f"arbitrage import table {_quoted(path)} {columns} -o {LOG}",
            0,
        )
    if router is not None:
        sure, ours, theirs = router
        columns = f"--confidence {_quoted(sure)} --primary-grade {_quoted(ours)} --guardian-grade {_quoted(theirs)}"
        columns += f" --id {_quoted(id)}" if id else ""
        held = f"{sure}: {converted}, which are converted" if converted else sure
        summary = f"a confidence ({held}), and grades of the Primary ({ours}) and the Guardian ({theirs})"
        missing = int(ungraded.sum())
        summary += (
            f"; rows without a grade, which count as the largest loss: {missing} of {len(ungraded)}" if missing else ""
        )
        return summary + few, f"arbitrage router-log {_quoted(path)} {columns} -o {LOG}", missing
    if f"{GUARDIAN_NAME}_grade" in names and any(name.endswith("_confidence") for name in names):
        raise OptionError(
            f"{path}: several models and a Guardian, as for a cascade: arbitrage calibrate {_quoted(path)} --path "
            f"--alpha {alpha:g} -o certificate.json"
        )
    if "confidence" in names and any(name in _ANSWERS for name in names):
        raise OptionError(
            f"{path}: items with a machine's labels, for experts to label some of: arbitrage batch plan {_quoted(path)} "
            f"--error {100 * alpha:g}%"
        )
    raise OptionError(
        f"{path}: no scores of two models among its columns ({', '.join(names)}); it needs two columns of lists, one column "
        "per option and model (p_yes, p_no, g_yes, g_no), or a confidence and two grades (confidence, small_ok, large_ok); "
        f"name columns called otherwise yourself: arbitrage router-log {_quoted(path)} --confidence COL --primary-grade COL "
        f"--guardian-grade COL -o {LOG}"
    )


_ANSWERS = ("answer", "prediction", "predicted", "machine_label", "model_answer", "model_label", "response", "output")
_TRUTHS = ("truth", "expert", "gold", "human", "human_label", "reference", "target", "expected")


def label_columns(table: ColumnReader) -> dict[str, str | None]:
    """Return which columns of a table hold a machine's labels, its confidence, ids and the truth; None where in doubt."""
    names = list(table.types)
    answer, truth = (next((name for name in usual if name in names), None) for usual in (_ANSWERS, _TRUTHS))
    usable = [name for name in names if name not in (answer, truth) and _words(name) & {*_SURE, *_CONFIDENCES}]
    sure = next((name for name in _CONFIDENCES if name in usable), usable[0] if len(usable) == 1 else None)
    id = "id" if "id" in names else _id_column(table, [name for name in names if name not in (answer, sure, truth)])
    return {"answer": answer, "confidence": sure, "id": id, "truth": truth}


def _wide_pair(names: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the columns of two models that name the same options behind two prefixes, the Guardian's second."""
    models: dict[str, dict[str, str]] = {}
    for name in names:
        prefix, separator, option = name.partition("_")
        if separator and option not in _NO_OPTIONS:
            models.setdefault(prefix, {})[option] = name
    pairs = [
        (p, g) for p in models for g in models if p != g and len(models[p]) > 1 and models[p].keys() == models[g].keys()
    ]
    if len(pairs) != 2:  # a pair either way round
        return None
    ours, theirs = pairs[0] if pairs[0][0] not in _GUARDIANS else pairs[1]
    return list(models[ours].values()), [models[theirs][option] for option in models[ours]]


def _router_columns(table: Table, names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return a confidence and the grades of two models, the Guardian's last; None if the columns leave a doubt."""
    names = [name for name in names if not _words(name) & _NEITHER]
    numbers = [name for name in names if _values(table, name) is not None]
    usable = [name for name in names if _is_confidence(table, name)]
    sures = [name for name in _CONFIDENCES if name in usable][:1]
    sures = sures or [name for name in usable if _words(name) & _SURE]
    others = [name for name in numbers if name not in sures]
    graded = [name for name in others if _words(name) & _GRADED]
    grades = graded if len(graded) == 2 else [name for name in others if _is_grade(table, name)]
    sures = sures or [name for name in usable if name not in grades]
    if not sures or len(grades) != 2:
        return None
    ours, theirs = reversed(grades) if _words(grades[0]) & _GUARDIANS else grades
    whose = _words(sures[0]) - _SURE
    if len(sures) > 1:  # one of each model
        sures = [name for name in sures if (_words(name) - _SURE) & _words(ours)]
    elif whose & _words(theirs) and not whose & _words(ours):
        ours, theirs = theirs, ours
    return (sures[0], ours, theirs) if len(sures) == 1 else None


def _id_column(table: ColumnReader, names: Sequence[str]) -> str | None:
    """Return the one column of distinct values with "id" in its name, else the one of codes; None if one is called id.

    Codes are words with a digit, such as T-1041. A column that counts the rows is none: an id stays with its row.
    """
    texts = {name: table.texts(name).tolist() for name in names if "id" not in table.types}
    texts = {name: values for name, values in texts.items() if len(set(values) - {""}) == table.rows}
    called = [name for name in texts if "id" in _words(name)]
    counts = [[str(k + first) for k in range(table.rows)] for first in (0, 1)]
    codes = [
        name
        for name, values in texts.items()
        if values not in counts and all(map(_CODE.fullmatch, values)) and not _words(name) & _NEITHER
    ]
    return next((found[0] for found in (called, codes) if len(found) == 1), None)


def _refuse_repeated_ids(table: Table, path: str, column: str = "id") -> None:
    """Refuse a table in which a question has several rows, as the printed commands would."""
    ids = [] if column not in table.types else [text for text in table.texts(column).tolist() if text]
    repeated = len(ids) - len(set(ids))
    if repeated:
        rows = n_rows(repeated, "has", "have")
        raise OptionError(
            f"{path}: in column '{column}', {rows} the id of an earlier row; keep one row of each question, or rename the "
            "column if it names something else, such as a conversation"
        )


def _refuse_grades(table: Table, names: Sequence[str], router: Sequence[str] | None) -> None:
    """Refuse grades that the printed commands would refuse, and two grades without a confidence."""
    for name in router[1:] if router else ():
        values = _values(table, name)
        if values is not None and values.size and not _is_grade(table, name):
            raise OptionError(
                f"{table.path}: column '{name}' goes from {values.min():g} to {values.max():g}, and grades lie in [0, 1]; "
                "rescale both models' grades first, such as those from 1 to 5 as (grade - 1) / 4"
            )
    grades = [name for name in names if _is_grade(table, name) and not _words(name) & _NEITHER]
    if router is None and len(grades) == len(names) == 2:
        path = _quoted(str(table.path))
        old, new = map(_quoted, sorted(grades, key=lambda name: -np.nanmean(table.scalars(name, truths=True))))
        raise OptionError(
            f"{table.path}: two grades ({' and '.join(grades)}) and no confidence of the Primary to route by; add a column "
            f"`confidence`, or see whether one model may replace the other: arbitrage swap {path} --old {old} --new {new} "
            "--alpha 0.05"
        )


def _lacks(table: Table, name: str) -> NDArray[np.bool_]:
    return np.isnan(table.scalars(name, truths=True))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _values(table: Table, name: str) -> Floats | None:
    """Return the numbers or truth values of a column; None if it holds anything else."""
    try:
        values = table.scalars(name, truths=True)
    except ScoreLogError:
        return None
    return values[~np.isnan(values)]


def _is_confidence(table: Table, name: str) -> bool:
    try:
        read_confidence(table, name)
    except ScoreLogError:
        return False
    return True


def _is_grade(table: Table, name: str) -> bool:
    values = _values(table, name)
    return values is not None and values.size > 0 and bool(np.all((values >= 0) & (values <= 1)))


def _naming(config: str) -> str:
    """Return the option that names a configuration, where commands would not find it by themselves."""
    return "" if config == CONFIG else f" --config {_quoted(config)}"


def _quoted(name: str) -> str:
    return shlex.quote(name)
