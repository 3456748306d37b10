"""Record what the product computes, to the bit, and compare it after the code has changed.

    python -m benchmarks.bits record tests/recorded/bits.json
    python -m benchmarks.bits compare tests/recorded/bits.json [--part bundled] [--part commands] ...

Only outputs are read: the public names of `conformal_arbitrage`, the command line, the files that it writes, and HTTP
replies of `arbitrage serve`. Fields of documents are found by name wherever they stand, so that a document may change its
layout; FIELDS lists other names that a field may have. A value that is absent and one that is null are the same.

Thresholds, draws, learned scores, digests and lines are exact; figures that are means over trials have ten digits. The
parts `bundled` and `commands` need nothing but the installed package, `gateway` also loopback, and `shared` the logs in
../shared/data.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

import conformal_arbitrage as ca

SECRET = "a secret only for recording bits"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FIELDS: dict[str, tuple[str, ...]] = {
    "relaxation": ("relaxation",),
    "boundary_u": ("boundary_u",),
    "empirical_risk": ("empirical_risk",),
    "slack": ("slack",),
    "envelope_excess": ("envelope_excess",),
    "regret": ("regret",),
    "spread": ("spread",),
    "clusters": ("clusters",),
    "missing_guardian_rows": ("missing_guardian_rows",),
    "no_opinion_rows": ("no_opinion_rows",),
    "position": ("position",),
    "u": ("u",),
    "cost": ("cost",),
    "guardian_share": ("guardian_share",),
}
"""Numbers of a certificate by the name in the recording, with the names that they may have in a document."""
_PLURAL = ("groups", "dial", "stops", "tuning", "ancestry", "identities", "columns", "on_this_log")
"""Fields that hold numbers of the same names for something else; a search does not enter them."""
_ALPHAS = ("0.02", "0.05", "0.1", "0.2")
_SEES = ("all", "candidates", "all-restricted-loss")
_MANY = 5000
"""Rows from which on learning a score takes long."""
Bits = dict[str, Any]


def digest(content: object) -> str:
    """Return the first 16 digits of the SHA-256 of bytes, of an array, or of anything as JSON."""
    if isinstance(content, np.ndarray):
        content = np.ascontiguousarray(content).tobytes()
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def seek(document: object, *names: str) -> Any:
    """Return the value of the least nested field with one of these names; None if there is none, or all are null."""
    waiting = deque([document])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, Mapping):
            known = [value[name] for name in names if value.get(name) is not None]
            if known:
                return known[0]
            waiting.extend(inner for name, inner in value.items() if name not in _PLURAL)
    return None


def rounded(value: Any) -> Any:
    """Return a document whose floats have ten digits: sums over trials may be taken in another order."""
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items() if inner is not None}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def without(document: Mapping[str, Any], *names: str) -> Bits:
    """Return a document without some of its fields, at whatever depth."""

    def pruned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: pruned(inner) for name, inner in value.items() if name not in names}
        return [pruned(inner) for inner in value] if isinstance(value, list) else value

    return pruned(document)


def threshold(document: Mapping[str, Any]) -> list[Any]:
    """Return what a stop of a dial, or a group, is decided by."""
    return [document.get(name) for name in ("relaxation", "boundary_u", "empirical_risk")]


def thresholds(document: Mapping[str, Any]) -> Bits:
    """Return the numbers of a certificate that a decision depends on, and the evidence behind them."""
    numbers = {name: seek(document, *names) for name, names in FIELDS.items()}
    bits = {name: value for name, value in numbers.items() if isinstance(value, int | float) and value != 0}
    if groups := seek(document, "groups"):
        bits["groups"] = digest({name: threshold(group) for name, group in groups.items()})
    if stops := seek(document, "dial", "stops"):
        bits["dial"] = digest([[stop["alpha"], *threshold(stop)] for stop in stops])
    if quantiles := seek(document, "margin_quantiles"):
        bits["margin_quantiles"] = digest(quantiles)
    if learned := seek(document, "rounded_rows"):
        bits["rounded_rows"] = learned
    return bits


def decided(certificate: Any, log: Any) -> Bits:
    """Return digests of who decides every row, of the actions, and of the learned scores if there are any."""
    decisions = certificate.apply(log)
    actions = np.asarray(decisions.action, dtype=np.int64)
    bits = {"deferred": int(np.sum(decisions.deferred)), "decisions": digest(actions) + digest(decisions.deferred)}
    if any(use is not None for use in decisions.learned or ()):
        uses = [None if use is None else (use.candidate, use.count, use.score) for use in decisions.learned]
        bits["scores"] = digest(uses)
    return bits


def calibration(log: Any, alpha: str, **options: Any) -> Bits:
    """Calibrate, and return thresholds and decisions; of a refusal, the name of the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            certificate = ca.calibrate(log, alpha, **keyed(options))
            return thresholds(certificate.to_dict()) | decided(certificate, log)
    except ca.ArbitrageError as error:
        return {"refused": type(error).__name__}


def keyed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a calibration with the boundary "include" if they name none, and with the key if they draw."""
    named = {"boundary": "include", **options}
    return {**named, "key": _key()} if named["boundary"] == "random" or "confidence" in named else named


def _key() -> bytes:
    return ca.ProjectSecret.from_text(SECRET.replace(" ", "-"), source="the recording").boundary_key


def squared_regret(row: Any, sight: Any) -> float:
    """A loss of one's own: the square of what the best action in sight lacks."""
    return float(np.max(row.guardian) - np.max(row.guardian[sight])) ** 2


def grid(log: Any, *, alphas: Iterable[str] = _ALPHAS) -> Iterator[tuple[str, Bits]]:
    """Calibrate with every rule: what the Guardian sees, and the boundary."""
    for alpha in alphas:
        for sees in _SEES:
            for boundary in ("include", "random"):
                bits = calibration(log, alpha, guardian_sees=sees, boundary=boundary)
                yield f"alpha={alpha}/{sees}/{boundary}", bits


def promises(log: Any, *, grouped: bool, binarized: Any = None) -> Iterator[tuple[str, Bits]]:
    """Calibrate with every promise, loss and score that the log allows."""
    for alpha in ("0.05", "0.1"):
        options: dict[str, dict[str, Any]] = {
            "net": {"loss": "net", "boundary": "random"},
            "betting": {"confidence": "0.95"},
            "betting/candidates": {"confidence": "0.9", "guardian_sees": "candidates"},
            "dial": {"confidence": "0.9", "dial": True},
            "margins": {"margins": True},
            "auto": {"score": "auto", "boundary": "random"},
            "learned": {"score": "learned", "boundary": "random"},
            "grid": {"grid": "0.01", "guardian_sees": "candidates"},
            "binomial": {"confidence": "0.95", "zero_one": True},
        }
        if grouped:
            options["groups"] = {"by": "group"}
            options["groups/random"] = {"by": "group", "boundary": "random"}
            options["groups/merge"] = {"by": "group", "small_groups": "merge"}
            options["groups/betting"] = {"by": "group", "confidence": "0.9"}
        for name, keywords in options.items():
            if len(log) < _MANY or "score" not in keywords or (alpha, name) == ("0.1", "auto"):
                yield f"alpha={alpha}/{name}", calibration(log, alpha, **keywords)
        if binarized is not None:
            for name, keywords in {
                "include": {}, "random": {"boundary": "random"}, "candidates": {"guardian_sees": "candidates"},
                "binomial": {"confidence": "0.95"}, "dial": {"confidence": "0.9", "dial": True},
                **({"auto": {"score": "auto", "boundary": "random"}} if len(log) < _MANY else {}),
            }.items():  # fmt: skip
                yield f"alpha={alpha}/binarized/{name}", calibration(binarized, alpha, **keywords)


def one_log(path: Path, *, grouped: bool, labelled: bool, **columns: str) -> Bits:
    """Return the bits of one score log: its digest, and thresholds under all rules and promises."""
    log = ca.ScoreLog.read(path, **columns)
    bits: Bits = {"log": _log_digest(log), **dict(grid(log))}
    binarized = log.binarized() if labelled and not log.is_router else None
    return bits | dict(promises(log, grouped=grouped, binarized=binarized))


def _log_digest(log: Any) -> str:
    return seek(ca.calibrate(log, "0.5", loss_bound=1).to_dict(), "log_sha256")


def draws() -> Bits:
    """Return draws of fixed ids: on a log of one gap, the boundary draw is that of one of its rows."""
    n = 200
    log = ca.ScoreLog.from_arrays([[0.7, 0.3]] * n, [[0.0, 1.0]] * n, id=[f"query-{k}" for k in range(n)])
    alphas = [f"0.{k:02d}" for k in range(1, 100, 4)]
    documents = {alpha: ca.calibrate(log, alpha, boundary="random", key=_key()).to_dict() for alpha in alphas}
    return {f"alpha={alpha}": seek(document, "boundary_u") for alpha, document in documents.items()}


def odd_logs(science: Path) -> Bits:
    """Return the bits of logs with missing scores, clusters, own losses and single precision."""
    log = ca.ScoreLog.read(science, primary="qwen15b", guardian="expert")
    offsets = np.asarray(log.offsets)
    rows = [slice(start, stop) for start, stop in pairwise(offsets)]
    primary, guardian = np.asarray(log.primary), np.asarray(log.guardian)
    menus = [primary[row] for row in rows[:600]]
    ids = [str(id) for id in np.asarray(log.id)[:600]]
    holes = ca.ScoreLog.from_arrays(
        [None if k % 17 == 3 else menu for k, menu in enumerate(menus)],
        [None if k % 23 == 5 and k % 17 != 3 else guardian[row] for k, row in enumerate(rows[:600])],
        id=ids,
    )
    single = ca.ScoreLog.from_arrays(
        np.array([menu[:3] for menu in menus], dtype=np.float32),
        np.array([guardian[row][:3] for row in rows[:600]], dtype=np.float32),
        id=ids,
    )
    bits: Bits = {}
    for alpha in ("0.05", "0.1", "0.2"):
        for sees in _SEES:
            bits[f"missing/alpha={alpha}/{sees}"] = calibration(
                holes, alpha, guardian_sees=sees, boundary="random", missing_guardian="worst_case"
            )
            bits[f"single/alpha={alpha}/{sees}"] = calibration(single, alpha, guardian_sees=sees)
            bits[f"own/alpha={alpha}/{sees}"] = calibration(
                log, alpha, guardian_sees=sees, loss=squared_regret, loss_bound=1
            )
        bits[f"own/alpha={alpha}/random"] = calibration(
            log, alpha, boundary="random", loss=squared_regret, loss_bound=2
        )
    return bits


def clustered(path: Path, folder: Path, **columns: str) -> Bits:
    """Return the bits of a log whose rows belong together by threes."""
    target = folder / "clustered.parquet"
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            "copy (select *, 'talk ' || ((row_number() over () - 1) // 3) as conversation "
            f"from '{path}') to '{target}' (format parquet)"
        )
    log = ca.ScoreLog.read(target, **columns)
    return {
        f"alpha={alpha}/{boundary}": calibration(
            log, alpha, boundary=boundary, cluster="conversation", max_cluster_size=3
        )
        for alpha in _ALPHAS
        for boundary in ("include", "random")
    }


def in_parts(path: Path, folder: Path, **columns: str) -> Bits:
    """Return thresholds of a log in three files; their digest may change, and is left out."""
    target = folder / "parts"
    target.mkdir()
    with duckdb.connect(config={"threads": 1}) as connection:
        for part in range(3):
            connection.execute(
                f"copy (select * exclude (place) from (select *, row_number() over () as place from '{path}') "
                f"where place % 3 = {part}) to '{target}/{part}.parquet' (format parquet)"
            )
    log = ca.ScoreParts.read(target, **columns)
    options: dict[str, dict[str, Any]] = {
        "include": {}, "random": {"boundary": "random"}, "candidates": {"guardian_sees": "candidates"},
        "betting": {"confidence": "0.95"}, "dial": {"confidence": "0.9", "dial": True}, "groups": {"by": "group"},
        "net": {"loss": "net", "boundary": "random"},
    }  # fmt: skip
    bits: Bits = {}
    for alpha in ("0.05", "0.1"):
        for name, keywords in options.items():
            try:
                bits[f"alpha={alpha}/{name}"] = thresholds(ca.calibrate(log, alpha, **keyed(keywords)).to_dict())
            except ca.ArbitrageError as error:
                bits[f"alpha={alpha}/{name}"] = {"refused": type(error).__name__}
    return bits


def command(*words: object) -> Any:
    """Run `arbitrage` in this process; return what it printed, parsed if it is JSON.

    Raises:
        RuntimeError: it did not end with status 0.
    """
    (script,) = entry_points(group="console_scripts", name="arbitrage")
    output, before = io.StringIO(), sys.argv
    sys.argv = ["arbitrage", *map(str, words)]
    status: object = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as messages:
            try:
                script.load()()
            except SystemExit as end:
                status = end.code
    finally:
        sys.argv = before
    if status:
        raise RuntimeError(f"arbitrage {' '.join(map(str, words))} ended with {status}: {messages.getvalue()[-500:]}")
    return json.loads(output.getvalue()) if "--json" in words else output.getvalue()


def columns_of(primary: str, guardian: str) -> tuple[str, ...]:
    """Return the options that name the models' columns."""
    return "--primary-column", primary, "--guardian-column", guardian


def written(path: Path) -> str:
    """Return the digest of the rows of a table, in their order, with columns by name."""
    with duckdb.connect(config={"threads": 1}) as connection:
        relation = connection.execute(f"select * from '{path}'")
        names = [column[0] for column in relation.description or ()]
        order = sorted(range(len(names)), key=names.__getitem__)
        rows = [[row[k] for k in order] for row in relation.fetchall()]
    return digest(repr((sorted(names), rows)).encode())


def applied(certificate: Path, log: Path, *options: object) -> str:
    """Apply a certificate by the command line; return the digest of the decisions that it writes."""
    target = certificate.with_name("decisions.jsonl")
    command("apply", certificate, log, *options, "-o", target)
    names = ("id", "action", "decided_by", "candidates", "margin", "learned")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    return digest([[row.get(name) for name in names] for row in rows])


def by_command(log: Path, folder: Path, *options: str) -> Bits:
    """Return what the command line says of a log: certificates, decisions, splits, scores, and research figures."""
    certificate, rest = folder / "certificate.json", folder / "rest.parquet"
    bits: Bits = {}
    for name, choices in {
        "include": ("--boundary", "include"), "random": (), "net": ("--loss", "net"), "auto": ("--score", "auto"),
        "groups": ("--by", "group"), "betting": ("--confidence", "0.9"), "binarized": ("--binarize",),
        "dial": ("--dial", "--confidence", "0.9"),
    }.items():  # fmt: skip
        document = command(
            "calibrate", log, *options, "--alpha", "0.1", *choices, "-o", certificate, "--force", "--json"
        )
        bits[f"calibrate/{name}"] = thresholds(document) | {"apply": applied(certificate, log, *options)}
        verified = command("verify", certificate, log, *options, "--json")
        bits[f"calibrate/{name}"]["verified"] = verified["ok"]
    command("certificate", "choose", certificate, "--alpha", "0.05", "-o", folder / "chosen.json")
    bits["choose"] = thresholds(command("certificate", "show", folder / "chosen.json", "--json"))
    command("split", log, folder / "explore.parquet", rest, *options, "--seed", "3")
    bits["split"] = [written(folder / "explore.parquet"), written(rest)]
    command("calibrate", folder / "explore.parquet", *options, "--alpha", "0.1", "-o", certificate, "--force")
    bits["assess"] = rounded(without(command("assess", certificate, rest, *options, "--json"), *_WORDS))
    command("learn", log, *options, "-o", folder / "scored.parquet")
    scored = ca.ScoreLog.read(folder / "scored.parquet")  # unrounded, so their last digits are the processor's
    bits["learn"] = {"scores": digest(np.round(np.asarray(scored.primary), 9)), **calibration(scored, "0.1")}
    return bits


_WORDS = (
    "next_steps",
    "source",
    "verdict",
    "problems",
    "guarantee",
    "note",
    "text",
    "promise",
    "left_out",
    "looked_at",
    "created",
)
"""Fields of documents that hold sentences, or say where a log lies: they may change."""


def research(log: Path, *options: str) -> Bits:
    """Return the figures of evaluate, compare, simulate and inspect, with fixed seeds."""
    evaluate = ("evaluate", log, *options, "--calibration-size", 300, "--trials", 5, "--alpha", 0.05, "--alpha", 0.1)
    costs = ("--primary-cost", 1, "--guardian-cost", 20)
    bits: Bits = {"inspect": rounded(without(command("inspect", log, *options, "--json"), *_WORDS))}
    for name, choices in {
        "include": ("--boundary", "include"), "random": (), "net": ("--loss", "net"), "auto": ("--score", "auto"),
        "candidates": ("--guardian-sees", "candidates", "--probability", 0.3), "betting": ("--confidence", "0.9"),
    }.items():  # fmt: skip
        document = command(*evaluate, *costs, *choices, "--json")
        bits[f"evaluate/{name}"] = {
            f"{point['policy']}/{point.get('alpha') or point.get('probability') or ''}": rounded(
                {key: (seek(point.get(key), "mean") if isinstance(point.get(key), Mapping) else point.get(key))
                 for key in ("loss", "relaxation", "deferred", "candidates", "cost_per_1000", "delta", "always_defer")}
            )
            for point in document["points"]
        }  # fmt: skip
    for name, choices in {
        "shift": ("--shift", 2), "none": ("--shift", 1), "alpha-line": ("--shift", 2, "--alarm-line", "alpha"),
        "seed": ("--shift", 2, "--seed", 7), "confident": ("--shift", 2, "--confidence", "0.9"),
        "random": ("--shift", 1.5),
    }.items():  # fmt: skip
        document = command("simulate", log, *options, "--alpha", 0.1, "--decisions", 20000, *choices, "--json")
        keep = ("lines", "moments", "delay", "outcomes")
        bits[f"simulate/{name}"] = rounded(without({key: document.get(key) for key in keep}, *_WORDS))
    rules = command("compare", log, *options, "--alpha", 0.1, "--splits", 4, *costs, "--json")["rules"]
    bits["compare"] = {rule["rule"]: rounded(without(rule, "rule", *_WORDS)) for rule in rules}
    return bits


def recommended(log: Path, *options: object) -> Bits:
    """Return what recommend chooses, with what it estimates and certifies."""
    document = command("recommend", log, "--alpha", 0.1, "--trials", 4, *options, "--json")
    keep = ("chosen", "options", "deferred", "deferred_interval", "tuning_rows", "certified_rows")
    bits = rounded(without({key: document.get(key) for key in keep}, *_WORDS))
    return {**bits, "options": digest(bits["options"]), "certificate": thresholds(document.get("certificate") or {})}


def plans() -> Bits:
    """Return what plan says of rows and audits."""
    audits = ("--audit-rate", 0.05, "--decisions-per-day", 10000)
    return {
        f"alpha={alpha}/bound={bound}": rounded(
            command("plan", "--alpha", alpha, "--loss-bound", bound, *audits, "--json")
        )
        for alpha, bound in ((0.02, 1), (0.05, 1), (0.1, 3))
    }


def leaves(value: object) -> Iterator[str]:
    """Yield every number and text of a document, whatever its layout."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(inner)
    elif value is not None:
        yield repr(value)


def cascade(log: Path, folder: Path, *choices: str) -> Bits:
    """Return the thresholds of a cascade for both losses: its chain with its path, and where it stops."""
    certificate = folder / "path.json"
    bits: Bits = {}
    for alpha in ("0.05", "0.1"):
        for name, options in {
            "chosen": (), "net": ("--loss", "net"), "seed": ("--seed", "5", "--tuning-share", "0.3"),
        }.items():  # fmt: skip
            command_line = ("calibrate", log, "--path", "--alpha", alpha, *choices, *options, "-o", certificate)
            document = command(*command_line, "--force", "--json")
            chain = digest(sorted(leaves(seek(document, "chain"))))
            bits[f"alpha={alpha}/{name}"] = {**thresholds(document), "chain": chain}
            bits["log"] = seek(document, "log_sha256")
    bits["verified"] = command("verify", certificate, log, "--json")["ok"]
    return bits


_GOOD = {"primary": "qwen15b", "guardian": "expert"}


def _science(folder: Path) -> Path:
    """Copy the bundled log: commands note beside a log that they have looked at it."""
    return Path(shutil.copy(Path(str(ca.__file__)).parent / "data" / "science.parquet", folder))


def bundled(folder: Path) -> Bits:
    """Record calibrations of the bundled log."""
    science = _science(folder)
    return {
        "draws": draws(),
        "science": one_log(science, grouped=True, labelled=True, **_GOOD),
        "odd": odd_logs(science),
        "clustered": clustered(science, folder, **_GOOD),
        "plan": plans(),
    }


def commands(folder: Path) -> Bits:
    """Record what commands print and write about the bundled log."""
    science, options = _science(folder), columns_of(**_GOOD)
    return {
        "parts": in_parts(science, folder, **_GOOD),
        "command": by_command(science, folder, *options),
        "research": research(science, *options),
        "recommend": recommended(science),
    }


_ROUTERS = {
    "frugalml-rafdb": ("cnn", "google"),
    "frugalml-expw": ("cnn", "microsoft"),
    "frugalml-yelp": ("vader", "amazon"),
    "frugalml-command": ("deepspeech", "microsoft"),
    "pac-stance": ("", ""),
    "pac-imagenet": ("", ""),
}
_NINE = {"medmcqa": "llama3.1-405b", "triviaqa": "gpt-4o", "truthfulqa": "gpt-4o", "gsm8k": "gpt-4o"}
_FEW = ("llama3.1-8b", "gpt-4o-mini", "llama3.1-70b")


def router_log(source: Path, folder: Path, primary: str, guardian: str) -> Path:
    """Write a log in router form by the command line; without a Guardian, people are right."""
    outcomes, target = folder / "outcomes.parquet", folder / f"router-{source.name}"
    prefix = f"{primary}_" if primary else ""
    right = f"{guardian}_right::double" if guardian else "1.0"
    confidence = f"{prefix}confidence"
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            f'copy (select id, greatest({confidence}, 0) as confidence, "{prefix}right"::double as small, {right} as large '
            f"from '{source}') to '{outcomes}' (format parquet)"
        )
    grades = ("--primary-grade", "small", "--guardian-grade", "large")
    command("router-log", outcomes, "--confidence", "confidence", *grades, "-o", target)
    return target


def services_log(source: Path, folder: Path, names: tuple[str, ...], guardian: str) -> Path:
    """Write the log of a cascade of services."""
    columns = [
        f"least(greatest({name}_confidence, 0), 1) as {name}_confidence, {name}_right::double as {name}_grade, "
        f"{name}_cost, {name}_answer::varchar as {name}_answer"
        for name in names
    ]
    last = f"{guardian}_right::double as guardian_grade, {guardian}_cost as guardian_cost"
    target = folder / f"cascade-{source.name}"
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            f"copy (select id, {', '.join(columns)}, {last} from '{source}' order by id limit 3000) "
            f"to '{target}' (format parquet)"
        )
    return target


def nine_models(source: Path, folder: Path, dataset: str, guardian: str) -> Path:
    """Write the log of a cascade from the table of nine models."""

    def column(model: str, value: str, name: str) -> str:
        return f"max({value}) filter (model = '{model}') as \"{name}\""

    columns = [
        column(model, value, f"{model}_{name}")
        for model in _FEW
        for name, value in {
            "confidence": "least(exp(raw_confidence), 1)", "grade": "correct", "cost": "cost_usd", "answer": "answer",
        }.items()
    ]  # fmt: skip
    columns += [column(guardian, "correct", "guardian_grade"), column(guardian, "cost_usd", "guardian_cost")]
    target = folder / f"nine-{dataset}.parquet"
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            f"copy (select split || '-' || qidx as id, {', '.join(columns)} from '{source}' "
            f"where dataset = '{dataset}' group by all order by 1) to '{target}' (format parquet)"
        )
    return target


def shared(folder: Path) -> Bits:
    """Record what needs the logs of ../shared/data."""
    for path in SHARED.glob("*.parquet"):
        shutil.copy(path, folder / path.name)
    science, bits = folder / "science.parquet", Bits()
    bits["science/smollm2"] = one_log(science, grouped=True, labelled=True, primary="smollm2", guardian="qwen15b")
    bits["science/qwen05b"] = one_log(science, grouped=True, labelled=True, primary="qwen05b", guardian="expert")
    pairs = {
        "truthfulqa-gpt35-gpt4turbo": (False, False), "mmlu-claude3sonnet-deepseek": (True, True),
        "mmlu-llama13b-gpt4": (True, True), "sciq-llama8b-gpt4o": (False, True),
        "judge-pairs-mistral7b-gpt4": (False, True), "korean-helpful-safe": (True, False),
    }  # fmt: skip
    for name, (grouped, labelled) in pairs.items():
        bits[name] = one_log(folder / f"{name}.parquet", grouped=grouped, labelled=labelled)
    for name in ("truthfulqa-gpt35-gpt4turbo", "sciq-llama8b-gpt4o"):
        log = ca.ScoreLog.read(folder / f"{name}.parquet")
        bits[name]["text"] = calibration(log, "0.1", score="auto", boundary="random", features=ca.Features(text=True))
        bits[name]["menu"] = calibration(log, "0.1", score="auto", boundary="random", features=ca.Features(menu_size=4))
        bits[name]["recommend"] = recommended(folder / f"{name}.parquet")
    for name in ("mmlu-llama13b-gpt4", "sciq-llama8b-gpt4o"):
        bits[name]["research"] = research(folder / f"{name}.parquet")
    bits["clustered"] = clustered(folder / "mmlu-llama13b-gpt4.parquet", folder)
    bits["parts"] = in_parts(folder / "mmlu-claude3sonnet-deepseek.parquet", folder)
    for name, (primary, guardian) in _ROUTERS.items():
        log = ca.ScoreLog.read(router_log(folder / f"{name}.parquet", folder, primary, guardian))
        bits[name] = {"log": _log_digest(log), **dict(grid(log, alphas=("0.02", "0.1")))}
        for option in (
            {"loss": "net", "boundary": "random"},
            {"confidence": "0.95"},
            {"score": "auto", "boundary": "random"},
        ):
            if len(log) < _MANY or "score" not in option:
                bits[name]["/".join(map(str, option.values()))] = calibration(log, "0.05", **option)
    for dataset, guardian in _NINE.items():
        log = nine_models(folder / "cascade-outcomes-9models.parquet", folder, dataset, guardian)
        bits[f"nine/{dataset}"] = cascade(log, folder)
        if dataset != "gsm8k":
            bits[f"nine/{dataset}/given"] = cascade(log, folder, "--chain", "gpt-4o-mini,llama3.1-70b")
    services = {"frugalml-rafdb": ("cnn", "facepp"), "frugalml-yelp": ("vader", "baidu")}
    for name, names in services.items():
        last = "google" if name == "frugalml-yelp" else "microsoft"
        bits[f"{name}/cascade"] = cascade(services_log(folder / f"{name}.parquet", folder, names, last), folder)
    return bits


def gateway(folder: Path) -> Bits:
    """Record replies of a gateway over loopback."""
    from benchmarks.bits_gateway import transcript

    return transcript(folder)


PARTS: dict[str, Callable[[Path], Bits]] = {
    "bundled": bundled,
    "commands": commands,
    "gateway": gateway,
    "shared": shared,
}


def record(parts: Iterable[str]) -> Bits:
    """Return the bits of these parts, as JSON would give them back."""
    bits: Bits = {}
    before = Path.cwd()
    secret = os.environ.get("ARBITRAGE_SECRET")
    os.environ["ARBITRAGE_SECRET"] = SECRET.replace(" ", "-")
    try:
        for part in parts:
            with tempfile.TemporaryDirectory() as name:
                os.chdir(name)  # configurations and secrets of whoever runs this must not count
                bits[part] = PARTS[part](Path(name))
                os.chdir(before)
    finally:
        os.chdir(before)
        if secret is None:
            del os.environ["ARBITRAGE_SECRET"]
        else:
            os.environ["ARBITRAGE_SECRET"] = secret
    return json.loads(json.dumps(bits))


def flat(bits: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a recording with its name; null is as good as absent."""
    if isinstance(bits, Mapping):
        for key, value in bits.items():
            yield from flat(value, f"{name}/{key}" if name else key)
    elif bits is not None:
        yield name, bits


def differences(old: Bits, new: Bits) -> list[str]:
    """Return a line for every value that is not the same."""
    first, second = dict(flat(old)), dict(flat(new))
    return [
        f"{name}: {first.get(name)!r} was recorded, now {second.get(name)!r}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    options = parser.parse_args()
    target = options.file.resolve()
    known = json.loads(target.read_text()) if target.exists() else {}
    parts = options.part or [part for part in PARTS if part != "shared" or SHARED.exists()]
    bits = record(parts)
    if options.what == "record":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**known, **bits}, separators=(",", ":"), sort_keys=True) + "\n")
        print(f"{sum(1 for _ in flat(bits)):,} values of {', '.join(parts)} in {target}")
        return
    lines = differences({part: known[part] for part in parts}, bits)
    print("\n".join([*lines, f"{len(lines)} of {sum(1 for _ in flat(bits)):,} values differ"]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
