"""What commands do with cascades: calibrate --path, and verify, apply and show their certificates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.signatures import check_signed
from conformal_arbitrage.errors import ConfigError, ScoreLogError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.path_certificate import PathCertificate
    from conformal_arbitrage.calibration.project_secret import ProjectSecret
    from conformal_arbitrage.calibration.verify import Verification
    from conformal_arbitrage.scorelog.cascade import CascadeLog

_WITH_PATH = frozenset(
    {
        "log",
        "alpha",
        "config",
        "loss",
        "missing_guardian",
        "fixed_before",
        "guardian_column",
        "output",
        "as_json",
    }
    | {"path", "chain", "models", "tuning_share", "seed"}
    | {"alphas", "calibration_size", "test_size", "trials", "form"}
)
_UNPROVED: Mapping[str, Any] = {
    "confidence": "confidence", "zero_one": "confidence", "dial": "dial", "by": "groups", "margins": "guard",
}  # fmt: skip


path_options = options.chained(
    click.option(
        "--path",
        is_flag=True,
        help="Calibrate a cascade of several models; LOG has NAME_confidence, NAME_grade, NAME_cost, NAME_answer of each.",
    ),
    click.option("--chain", metavar="A,B", help="With --path: ask these models, in this order.  [default: chosen]"),
    click.option("--models", metavar="A,B,...", help="With --path: choose the chain among these.  [default: all]"),
    click.option(
        "--tuning-share",
        type=float,
        default=0.4,
        show_default=True,
        metavar="S",
        help="With --path: share of the rows to choose and fit the chain on.",
    ),
)


def take_options(further: dict[str, Any], *also: str) -> bool:
    """Take the options of a cascade out of a command's; return whether it is about one.

    Args:
        further: the command's options.
        also: those that only a cascade has, besides `path_options`.

    Raises:
        OptionError: an option has no proof for a cascade.
        UsageError: an option has no meaning for a cascade, or is one of a cascade without --path.
    """
    names = ("chain", "models", "tuning_share", *also)
    for name in names:
        del further[name]
    if further.pop("path"):
        _refuse_others()
        return True
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} describes a cascade; add --path")
    return False


def _refuse_others() -> None:
    """Refuse options that have no meaning, or no proof, for a cascade."""
    from conformal_arbitrage.calibration.combinations import refuse_combination

    context = click.get_current_context()
    for name in context.params:
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE or name in _WITH_PATH:
            continue
        if name in _UNPROVED:
            refuse_combination(_UNPROVED[name], "path")
        raise click.UsageError(
            f"--{name.replace('_', '-')} has no meaning for a cascade; leave it out, or leave out --path"
        )


def read_cascade(path: str, guardian: str | None, models: str | None) -> "CascadeLog":
    """Read the log of a cascade with the models that the options name."""
    from conformal_arbitrage.scorelog.cascade import GUARDIAN_NAME, CascadeLog

    return CascadeLog.read(path, guardian=guardian or GUARDIAN_NAME, models=named(models))


def named(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated text; None if there is none."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def calibrate_path_command(alpha: str, loss: Any, secret: "ProjectSecret | None") -> None:
    """Calibrate a cascade as the command line says, sign and write its certificate, and show it."""
    from conformal_arbitrage.calibration.cascade import calibrate_cascade

    parameters = click.get_current_context().params
    scores = read_cascade(parameters["log"], parameters["guardian_column"], parameters["models"])
    certificate = calibrate_cascade(
        scores,
        alpha,
        key=path_key(secret),
        loss=loss,
        chain=named(parameters["chain"]),
        tuning_share=parameters["tuning_share"],
        seed=parameters["seed"],
        missing_guardian=parameters["missing_guardian"],
    )
    looks = options.describe_looks(
        scores, parameters["log"], parameters["config"], fixed_before=parameters["fixed_before"]
    )
    certificate = certificate if looks is None else certificate.with_looks(looks)
    certificate = certificate if secret is None else certificate.sign(secret)
    if parameters["output"] is not None:
        certificate.save(parameters["output"])
    _show_path_certificate(certificate, parameters["output"], as_json=parameters["as_json"])


def evaluate_path_command(loss: Any) -> None:
    """Run held-out trials of a cascade as the command line says, and show what they cost and lose."""
    from conformal_arbitrage.evaluation.cascades import evaluate_cascade

    parameters = click.get_current_context().params
    if parameters["form"] not in (None, "json"):
        raise click.UsageError(
            f"trials of a cascade are printed as a table or with --json, not with --{parameters['form']}"
        )
    scores = read_cascade(parameters["log"], parameters["guardian_column"], parameters["models"])
    evaluation = evaluate_cascade(
        scores,
        parameters["alphas"],
        calibration_size=parameters["calibration_size"],
        test_size=parameters["test_size"],
        trials=parameters["trials"],
        seed=parameters["seed"],
        loss=loss,
        chain=named(parameters["chain"]),
        tuning_share=parameters["tuning_share"],
        missing_guardian=parameters["missing_guardian"],
    )
    options.remember_look(scores, parameters["log"], "evaluate")
    if parameters["form"] == "json":
        options.print_json(evaluation.to_dict())
        return
    header = ["alpha", "loss", "trials over alpha", "cost / Guardian alone", "Guardian answers", "chains chosen"]
    rows = [
        [
            f"{point.alpha:g}",
            f"{point.loss:.4f} ± {point.loss_error:.4f}",
            f"{point.over:.2f}",
            f"{point.cost:.3f} ± {point.cost_error:.3f}",
            f"{100 * point.guardian_share:.1f} %",
            ", ".join(f"{chain} ({count})" for chain, count in list(point.chains.items())[:3]),
        ]
        for point in evaluation.points
    ]
    options.print_table(header, rows, title=f"{evaluation.trials} trials, mean ± standard error")
    click.echo("The promise is an average, so single trials may lie above alpha, about half of them.")


def path_key(secret: "ProjectSecret | None") -> bytes:
    """Return the key behind the draws.

    Raises:
        ConfigError: there is no secret.
    """
    if secret is None:
        raise ConfigError(
            "--path draws with the project's secret, and there is none here: run `arbitrage init`, which writes one, or set "
            "ARBITRAGE_SECRET to a long random text"
        )
    return secret.boundary_key


def _show_path_certificate(certificate: "PathCertificate", output: str | None, *, as_json: bool) -> None:
    """Print a certificate of a cascade."""
    from conformal_arbitrage.calibration.planning import rows_needed

    if certificate.status == "always_defer":
        options.warn(
            f"{certificate.n} rows cannot certify alpha {certificate.alpha:g}, so every query is deferred; at least "
            f"{rows_needed(certificate.alpha, 1)} rows are needed besides those that the chain is tuned on"
        )
    if as_json:
        options.print_json(certificate.to_dict())
        return
    options.print_facts(certificate.facts())
    click.echo(f"\n{options.wrapped(certificate.summary)}\n")
    if output is None:
        click.echo(options.wrapped(certificate.guarantee))
        return
    click.echo(f"Written: {output}, with the whole guarantee and its conditions.")
    if not certificate.signed:
        click.echo("It is unsigned, so `serve` refuses it: there is no project secret; `arbitrage init` writes one.")


def load_path_certificate(path: str, *folders: Path) -> "PathCertificate | None":
    """Load a certificate of a cascade with its key; None if the file holds another kind."""
    from conformal_arbitrage.calibration.documents import read_document
    from conformal_arbitrage.calibration.path_certificate import PathCertificate, is_path_document

    document = read_document(Path(path))
    if not is_path_document(document):
        return None
    certificate = PathCertificate.from_dict(document, source=path)
    secret = options.project_secret(None, *folders, Path(path).parent, Path())
    check_signed(certificate, secret, path)
    return certificate if secret is None else certificate.with_key_of(secret)


def verify_path_certificate(certificate: "PathCertificate", source: str, log: str) -> "Verification":
    """Recompute a certificate of a cascade from its log; exit 1 if it cannot have been made from it."""
    from conformal_arbitrage.calibration.cascade import verify_cascade
    from conformal_arbitrage.scorelog.cascade import CascadeLog

    try:
        return verify_cascade(
            certificate, CascadeLog.read(log, guardian=certificate.guardian, models=certificate.models)
        )
    except ScoreLogError as error:
        click.echo(f"arbitrage: {source} cannot have been made from {log}: {error}", err=True)
        raise SystemExit(1) from error


def apply_path_certificate(certificate: "PathCertificate", log: str, output: str | None, *, as_json: bool) -> None:
    """Decide every row of a log with a cascade, and show who answers how often."""
    from conformal_arbitrage.scorelog.cascade import CascadeLog
    from conformal_arbitrage.scorelog.files import write_text

    scores = CascadeLog.read(log, guardian=certificate.guardian, models=certificate.chain.models)
    decisions = certificate.apply(scores)
    names = [*certificate.chain.models, certificate.guardian]
    answered: list[str] = [names[place] for place in decisions.answered_by.tolist()]
    if output is not None:
        rows = zip(scores.id.tolist(), answered, decisions.cost.tolist(), strict=True)
        lines = [json.dumps({"id": id, "answered_by": who, "cost": cost}, ensure_ascii=False) for id, who, cost in rows]
        write_text(output, "".join(f"{line}\n" for line in lines))
    counts = {name: answered.count(name) for name in names}
    if as_json:
        options.print_json({"rows": len(scores), "answered_by": counts, "cost": float(decisions.cost.mean())})
        return
    shares = ", ".join(f"{name} {count} ({100 * count / len(scores):.1f} %)" for name, count in counts.items())
    click.echo(f"{len(scores)} rows, answered by {shares}.")
    if output is not None:
        click.echo(f"Written: {output}")


def progress_line(done: int, total: int) -> None:
    """Say how far a collection has come, ten times on its way."""
    if done == total or done % max(1, total // 10) == 0:
        options.progress(f"{done} of {total} rows")


def show_collected_cascade(log: "CascadeLog", output: str, *, as_json: bool) -> None:
    """Print what a collection over all models of a cascade has come to."""
    import numpy as np

    costs = {name: float(log.cost[:, place].sum()) for place, name in enumerate(log.models)}
    costs[log.guardian] = float(log.guardian_cost.sum())
    failures = {name: int(np.isnan(log.confidence[:, place]).sum()) for place, name in enumerate(log.models)}
    figures = {
        "rows": len(log),
        "cost": costs,
        "without_answer": failures,
        "missing_guardian_rows": int(np.isnan(log.guardian_grade).sum()),
    }
    if as_json:
        options.print_json(figures)
        return
    header = ["model", "rows without an answer", "cost"]
    rows = [
        [name, str(failures.get(name, figures["missing_guardian_rows"])), f"${cost:.4g}"]
        for name, cost in costs.items()
    ]
    options.print_table(header, rows, title=f"{len(log)} rows")
    click.echo(
        f"Written: {output}. Next: arbitrage calibrate {output} --path --guardian-column {log.guardian} --alpha A"
    )


def ask_path(
    certificate: "PathCertificate",
    question: str,
    actions: tuple[str, ...],
    settings: dict[str, Any],
    name: str | None,
    config: str,
    policy: str | None,
    allow: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Make one live decision with a cascade, from a menu if actions are given, and show it."""
    import asyncio

    from conformal_arbitrage.cli.live import decision_json
    from conformal_arbitrage.live.build import Models
    from conformal_arbitrage.live.config import with_task
    from conformal_arbitrage.types import ChatRequest, Query

    form = "menu" if actions else "text"
    configuration = with_task(options.read_pair(config, policy), config, form=form)

    async def decide() -> Any:
        async with Models(configuration) as models:
            if actions:
                return await models.cascade_chooser(certificate, allow).decide(Query(question, actions, id=name))
            body = {"messages": [{"role": "user", "content": question}], **settings}
            return await models.cascade_router(certificate, allow).decide(ChatRequest(body, id=name))

    decision = asyncio.run(decide())
    if as_json:
        options.print_json(decision_json(decision))
        return
    chain = [*certificate.chain.models, certificate.guardian][: len(decision.legs)]
    promise = f"expected loss at most {certificate.alpha:g}" if decision.no_guarantee is None else "none: "
    answer = decision.answer if isinstance(decision.answer, str) else str(decision.answer.get("content"))
    options.print_facts(
        [
            ("answer", answer),
            ("answered by", chain[-1] if decision.decided_by != "fallback" else "the safe answer"),
            ("asked", ", ".join(chain)),
            ("guarantee", promise + (decision.no_guarantee or "")),
            ("id", str(decision.id)),
        ]
    )
