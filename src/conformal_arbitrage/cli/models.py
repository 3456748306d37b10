"""Commands for live models: init, check, collect, ask."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import isinf
from typing import Any, Self

import click
import msgspec
import numpy as np
from msgspec import structs
from rich import progress as bars
from rich.console import Console

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import Net, PerSession
from conformal_arbitrage.calibration.sentences import as_written
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.output import (
    print_facts,
    print_json,
    print_progress,
    print_table,
    warn,
)
from conformal_arbitrage.collecting import collect as collecting
from conformal_arbitrage.collecting.collect import (
    Collection,
    EndpointEstimate,
    Progress,
    collected_totals,
    replies_path,
)
from conformal_arbitrage.collecting.questions import Menus, Requests, read_questions
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.errors import ConfigError, OptionError, StoreError
from conformal_arbitrage.live.build import Models, database_exists, database_of
from conformal_arbitrage.live.check import (
    ProbeResult,
    certificates_at_hand,
    check_models,
    pinned_changes,
    stale_certificates,
    stale_graders,
)
from conformal_arbitrage.live.config import Config, read_config, template, with_task, write_pinned
from conformal_arbitrage.live.rule import (
    chain_replies,
)
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import SETTINGS, checked_settings
from conformal_arbitrage.models.kinds import ROLES, Form, has_terminal
from conformal_arbitrage.models.resilience import dollars, stored_cost
from conformal_arbitrage.models.webhook import url_mistake
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.store import policies
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.types import ChatRequest, Decision, Query, Spent


@click.command("init")
@click.option(
    "--form", type=click.Choice(["menu", "text"]), default="text", show_default=True,
    help="Free text, or questions with a menu of options.",
)  # fmt: skip
@click.option("--primary-url", metavar="URL", help="The Primary's endpoint.  [default: OpenAI's]")
@click.option("--primary-model", metavar="NAME", help="Its model.")
@click.option("--guardian-url", metavar="URL", help="The Guardian's endpoint.  [default: OpenAI's]")
@click.option("--guardian-model", metavar="NAME", help="Its model.")
@click.option("-o", "--output", default="arbitrage.toml", show_default=True, metavar="FILE", help="The file to write.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init_command(*, form: Any, output: str, force: bool, **models: str | None) -> None:
    """Write a short, commented configuration to start from.

    \b
    arbitrage init
    arbitrage init --primary-url http://localhost:11434/v1 --primary-model llama3.2
    arbitrage init --form menu
    """
    options.refuse_existing(output, force=force)
    given = {role: (models[f"{role}_url"], models[f"{role}_model"]) for role in ROLES}
    for role, (url, _) in given.items():
        if url is not None and (mistake := url_mistake(url)):
            raise click.UsageError(f"--{role}-url {mistake}")
    write_text(output, template(form, given))
    click.echo(
        f"Written: {output}. Edit its models and prices, export the API keys it names, then run `arbitrage check`.\n"
        "For production, calibrate with --confidence 0.95: the monitor's alarm then stands at alpha itself."
    )


@click.command("check")
@options.config_file
@click.option("--yes", is_flag=True, help="Replace pinned values without asking, though certificates become stale.")
@click.option(
    "--repeats", type=click.IntRange(2, 100), metavar="N",
    help="Also ask the Primary one question N times, and say how much its lead differs.",
)  # fmt: skip
@options.as_json
def check_command(*, config: str, yes: bool, repeats: int | None, as_json: bool) -> None:
    """Test each model with a tiny request, detect which API features it supports, and pin them in the configuration.

    \b
    arbitrage check
    arbitrage check --yes
    arbitrage check --repeats 10
    """
    configuration = read_config(config)
    results = asyncio.run(check_models(configuration, repeats=repeats or 0))
    problems = {result.role: result.problem for result in results if result.problem is not None}
    working = [result for result in results if result.problem is None]
    pinned = {result.role: result.pinned for result in working if result.pinned is not None}
    writing = bool(pinned) and problems.keys() <= {"judge"}  # the other models can be used without a grader
    certificates = certificates_at_hand(configuration, _installed(configuration))
    if writing:
        if not yes:
            _confirm_changes(configuration, working, certificates, may_ask=not as_json and has_terminal())
        write_pinned(config, pinned)
    graders = stale_graders(certificates, configuration)
    for name, reason in graders.items():
        warn(f"{name}: {reason}; grade or collect again, and calibrate again")
    if as_json:
        print_json({"ok": not problems, "models": msgspec.to_builtins(results), "stale_graders": graders})
    else:
        _show_checks(results)
        if writing:
            click.echo(f"Written: {config} ([{'.pinned], ['.join(pinned)}.pinned])")
    if problems:
        what = "--grade judge" if writing else "this configuration"
        listed = "; ".join(f"[{role}] {problem}" for role, problem in problems.items())
        raise click.ClickException(f"{what} cannot be used: {listed}")


def _installed(config: Config) -> list[PolicyVersion]:
    """Return the certificates in force in the gateway's database, if there is one; a warning if it cannot be read."""

    async def read() -> list[PolicyVersion]:
        async with await open_store(database_of(config)) as store:
            return await store.run(policies.active)

    try:
        return asyncio.run(read()) if config.policies and database_exists(config) else []
    except (StoreError, ConfigError) as error:
        warn(f"certificates in the gateway's database are not looked at: {error}")
        return []


def _confirm_changes(
    config: Config, results: list[ProbeResult], certificates: dict[str, Certificate], *, may_ask: bool
) -> None:
    """Ask before pinned values are replaced, naming the certificates that become stale; refuse where no one can answer."""
    changes = pinned_changes(config, results)
    if not changes:
        return
    listed = "; ".join(map(str, changes))
    stale = ", ".join(stale_certificates(certificates, config, changes))
    consequence = f"stale would be {stale}" if stale else "no certificate at hand depends on it"
    if not may_ask or not click.confirm(f"{listed}; {consequence}. Replace what is pinned?", err=True):
        raise click.ClickException(
            f"nothing was written: {listed}; {consequence}; --yes replaces it, then collect and calibrate again"
        )


def _show_checks(results: list[ProbeResult]) -> None:
    header = ["model", "kind", "answers", "served", "seconds", "cost", "mode", "logprobs"]
    rows = [
        [
            role_name(result.role),
            result.kind,
            "no" if result.problem else "yes" if result.tested else "not asked",
            result.served or (None if result.problem else result.model) or "",
            f"{result.seconds:.2f}",
            dollars(result.spent.cost) if result.priced else "unknown",
            "" if result.pinned is None else result.pinned.mode,
            {None: "", True: "yes", False: "no"}[result.logprobs],
        ]
        for result in results
    ]
    print_table(header, rows)
    for result in results:
        for note in result.notes:
            click.echo(f"  {role_name(result.role)}: {note}")


@click.command("collect")
@click.argument("questions")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="The score log to write; raw replies are kept beside it."
)
@click.option(
    "--form", type=click.Choice(["menu", "text"]), help="Menus of options or free text.  [default: as configured]"
)
@options.config_file
@options.policy
@click.option(
    "--question-column", metavar="NAME", help="Column of the question.  [default: question; text form: messages]"
)
@click.option("--choice-columns", metavar="A,B,...", help="Columns of the options, one each.")
@click.option("--choices-column", metavar="NAME", help="Column with the list of options.  [default: choices]")
@click.option("--choices", metavar="A,B,...", help="The options of every row, for a fixed set of labels.")
@click.option(
    "--answer-column",
    metavar="NAME",
    help="Column of the right option, or in text form of the reference answer; '' for none.  [default: answer or label]",
)
@click.option(
    "--answer-is", type=click.Choice(["letter", "index", "text"]), help="How the answer column names an option."
)
@click.option("--id-column", metavar="NAME", help="Column of unique ids.  [default: id, or derived from the content]")
@click.option("--group-column", metavar="NAME", help="Column of a group, such as subject, tenant or language.")
@click.option("--shuffle-options", is_flag=True, help="Shuffle the options by a hash of the question.")
@click.option(
    "--grade",
    metavar="HOW",
    help="Grader in text form: exact, regex, json-equal, judge, human, python:MODULE:FUNCTION.",
)
@click.option("--path", is_flag=True, help="Ask all models of [cascade], for a log that `calibrate --path` reads.")
@click.option(
    "--floor",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Ask no Guardian about rows whose margin, or confidence, is below X; set it by other rows, such as a pilot.",
)
@click.option("--pilot", metavar="FILE", help="The score log that the floor was set by; its rows are left out.")
@options.paid_run(
    limit="Use the first N rows only.",
    dry_run="Send nothing; estimate the cost.",
    max_cost="Stop before the total cost exceeds this.",
)
@options.as_json
def collect_command(questions: str, *, output: str, config: str, dry_run: bool, as_json: bool, **settings: Any) -> None:
    """Ask both models about every row and write a score log; run the same command again to resume.

    \b
    arbitrage collect questions.jsonl -o log.parquet --dry-run
    arbitrage collect questions.csv -o log.parquet --choice-columns A,B,C,D \\
        --answer-column answer --max-cost 5.00
    arbitrage collect tickets.csv -o log.parquet --question-column text --choices billing,bug,other
    arbitrage collect requests.jsonl -o log.parquet --form text --grade json-equal
    arbitrage collect questions.jsonl -o cascade.parquet --path
    """
    options.refuse_same(questions, output)
    models = _with_settings(options.read_policy_config(config, settings.pop("policy")), config, settings)
    pilot = None if settings["pilot"] is None else ScoreLog.read(settings["pilot"])
    rows = _without_pilot(_read_rows(questions, settings), pilot)
    limits = {name: settings[name] for name in ("grade", "limit", "concurrency", "max_cost", "floor")}
    if settings["path"]:
        return _collect_cascade(models, rows, output, limits, dry_run=dry_run, as_json=as_json)
    if dry_run:
        estimates = asyncio.run(collecting.Collection.of(models, rows, output=output, **limits).estimate())
        return _show_estimate_with_floor(estimates, settings["floor"], pilot, as_json=as_json)
    with nullcontext(None) if as_json or collecting.has_person(models, settings["grade"]) else ProgressBar() as bar:
        progress = None if bar is None else bar.show
        try:
            log = asyncio.run(collecting.collect(models, rows, output=output, progress=progress, **limits))
        except KeyboardInterrupt as error:
            raise click.ClickException(
                "interrupted; all replies so far are stored, run the same command again to resume"
            ) from error
    if settings["answer_column"] is None and rows.answer_column is not None and not as_json:
        click.echo(f"The answers were taken from the column '{rows.answer_column}'.", err=True)
    if models.task.settings == "as requested" and settings["form"] == "text" and "settings" not in log.extra:
        warn(
            "no row has settings such as temperature or max_tokens; requests that come with some will be other traffic "
            "than this log. Add them as columns, or collect from live traffic in shadow mode"
        )
    _show_collected(log, output, as_json=as_json)


def _collect_cascade(
    models: Config, rows: Menus | Requests, output: str, limits: dict[str, Any], *, dry_run: bool, as_json: bool
) -> None:
    collection = Collection(config=models, rows=rows.first(limits.pop("limit")), output=output, **limits)
    if dry_run:
        return show_estimate(asyncio.run(collection.estimate(cascade=True)), as_json=as_json)
    log = asyncio.run(collection.run_cascade(None if as_json else progress_line))
    log.write(output)
    show_collected_cascade(log, output, as_json=as_json)


def _without_pilot(rows: Menus | Requests, pilot: ScoreLog | None) -> Menus | Requests:
    if pilot is None:
        return rows
    if pilot.id is None:
        raise OptionError(
            f"{pilot.source}: has no `id` column, so its rows cannot be left out; leave them out yourself"
        )
    return rows.without(set(pilot.id.tolist()))


def _show_estimate_with_floor(
    estimates: list[EndpointEstimate], floor: float | None, pilot: ScoreLog | None, *, as_json: bool
) -> None:
    """Print an estimate, and what a floor is expected to take off it if there is a pilot to tell."""
    if floor is None:
        return show_estimate(estimates, as_json=as_json)
    if pilot is None:
        show_estimate(estimates, as_json=as_json)
        if not as_json:
            click.echo("Rows without a reply of the Primary count as above the floor; --pilot says how many are not.")
        return
    guardian = sum((estimate.spent for estimate in estimates if estimate.role == "guardian"), start=Spent())
    share = float(replace(pilot, floor=floor).below_floor.mean())
    calls, cost = round(share * guardian.calls), None if guardian.cost is None else share * guardian.cost
    show_estimate(estimates, as_json=as_json, expected_saving={"calls": calls, "cost": cost})
    if not as_json:
        click.echo(
            f"The floor saves about {calls} of the Guardian's calls ({100 * share:.0f} %, as in the pilot), {dollars(cost)}."
        )


def _with_settings(config: Config, path: str, settings: dict[str, Any]) -> Config:
    """Return the configuration with the options of this call; fill in the form if it was not given."""
    settings["form"] = settings["form"] or config.task.form
    shuffle = config.task.shuffle_options or settings["shuffle_options"]
    return with_task(config, path, form=settings["form"], shuffle_options=shuffle)


def _read_rows(questions: str, settings: dict[str, Any]) -> Menus | Requests:
    names = ("question_column", "choices_column", "answer_column", "answer_is", "id_column", "group_column")
    columns = {name: settings[name] for name in names}
    choice_columns, choices = (options.listed(settings[name] or "") for name in ("choice_columns", "choices"))
    return read_questions(questions, settings["form"], choice_columns=choice_columns, choices=choices, **columns)


def _show_collected(log: ScoreLog, output: str, *, as_json: bool) -> None:
    totals = collected_totals(log)
    known, unknown = stored_cost(replies_path(output))
    totals["cost"] = None if unknown else known
    if as_json:
        print_json({**totals, "output": output, "replies": str(replies_path(output))})
        return
    for role in ("primary", "guardian"):
        failed, cost = totals[f"{role}_failures"], totals[f"{role}_cost"]
        click.echo(f"{role}: {n_rows(totals['rows'])}, {failed} failed, cost {dollars(cost)}")
    if "not_asked_rows" in totals:
        rows, saved = n_rows(totals["not_asked_rows"]), dollars(totals["saved"])
        click.echo(f"not asked: the Guardian about {rows} below the floor {log.floor:g}, which saved about {saved}")
    click.echo(f"all replies, including graders and earlier runs: cost {dollars(totals['cost'])}")
    if totals["missing_guardian_rows"]:
        warn(
            f"{n_rows(totals['missing_guardian_rows'], 'has', 'have')} no Guardian score: run the same command again to "
            "retry the failed calls (a reply that cannot be parsed is kept and not requested again), or calibrate with "
            "--missing-guardian worst_case; the column guardian_error gives the reasons"
        )
    click.echo(f"Written: {output}; raw replies in {replies_path(output)}")


@click.command("ask")
@click.argument("certificate")
@click.argument("question")
@click.option(
    "--action",
    "actions",
    multiple=True,
    metavar="TEXT",
    help="An option of the menu; repeat it for each. Omit in text form.",
)
@click.option(
    "--setting",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="In text form, a setting of the request, such as temperature=0; may be repeated.",
)
@click.option("--id", "name", metavar="ID", help="The query's id.  [default: generated]")
@click.option("--group", metavar="NAME", help="The query's group, for a certificate by groups or a learned score.")
@options.config_file
@options.policy
@click.option(
    "--allow", multiple=True, metavar="NAME", help="Tolerate this difference, without a guarantee; may be repeated."
)
@options.as_json
def ask_command(
    certificate: str,
    question: str,
    *,
    actions: tuple[str, ...],
    given: tuple[str, ...],
    name: str | None,
    group: str | None,
    config: str,
    policy: str | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make one live decision: who decided, why, and at what cost.

    \b
    arbitrage ask certificate.json "Which planet is the largest?" --action Jupiter --action Saturn
    arbitrage ask certificate.json "Summarise: ..."          text form
    """
    loaded = options.load_certificate(certificate)
    configuration = options.read_policy_config(config, policy)
    form = _form_of(loaded, actions)
    if bool(actions) != (form == "menu"):
        remedy = "drop --action" if actions else "give --action for each option"
        raise click.UsageError(f"{certificate} is in {form} form: {remedy}")
    if actions and given:
        raise click.UsageError(f"{certificate} is in menu form, where a request has no settings: drop --setting")
    settings = _read_settings(given)
    body = {"messages": [{"role": "user", "content": question}], **settings}

    async def decide() -> Decision:
        async with Models(with_task(configuration, config, form=form)) as models:
            if actions:
                query = Query(question, actions, id=name, group=group)
                return await models.policy(loaded, allow).decide(query)
            return await models.router(loaded, allow).decide(ChatRequest(body, id=name, group=group))

    decision = asyncio.run(decide())
    if as_json:
        print_json(decision_json(decision))
    elif loaded.is_cascade:
        _show_path_decision(decision, loaded, actions or None)
    else:
        _show_decision(decision, loaded)


def _read_settings(given: tuple[str, ...]) -> dict[str, Any]:
    """Return settings from NAME=VALUE, where a value is JSON or a bare text."""
    values: dict[str, Any] = {}
    for setting in given:
        name, equals, text = setting.partition("=")
        if not equals or name not in SETTINGS:
            raise click.UsageError(f"--setting {setting!r:.60} is not NAME=VALUE with a name of {', '.join(SETTINGS)}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    try:
        return checked_settings(values)
    except ValueError as error:
        raise click.UsageError(f"--setting {error}") from error


def _form_of(certificate: Certificate, actions: tuple[str, ...]) -> Form:
    """Return the form of a certificate: by the models that made it or, if it names none, by the form of its log.

    A cascade decides in both forms.
    """
    if certificate.is_cascade:
        return "menu" if actions else "text"
    if certificate.identities == "unbound":
        return "text" if certificate.evidence.router else "menu"
    answers = certificate.identities["primary"].get("kind") == "answer"
    return "text" if answers or "grader" in certificate.identities else "menu"


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return a decision as a JSON document; an infinite margin (a single action) becomes null."""
    margin = None if isinf(decision.margin) else decision.margin
    return msgspec.to_builtins({**structs.asdict(decision), "margin": margin, "spent": decision.spent})


def _show_decision(decision: Decision, certificate: Certificate) -> None:
    facts = [
        ("answer", _answer(decision)),
        ("decided by", role_name(decision.decided_by)),
        ("why", _why(decision)),
        ("guarantee", _promise(decision, certificate)),
        ("cost", dollars(decision.spent.cost)),
    ]
    facts += [
        (
            role_name(leg.role),
            f"{leg.seconds:.2f} s, cost {dollars(leg.spent.cost)}" + (f", failed: {leg.error}" if leg.error else ""),
        )
        for leg in decision.legs
    ]
    print_facts([*facts, ("id", str(decision.id))])


def _why(decision: Decision) -> str:
    """Explain a decision."""
    if len(decision.candidates) == 1 and not decision.legs:
        return "there is only one action"
    if any(leg.role == "primary" and leg.error for leg in decision.legs):
        return "the Primary failed, so it has no opinion"
    if decision.learned is not None:
        keeps = f"the learned score ({decision.learned.candidate}) keeps {n_rows(decision.learned.count)} of the log"
        return f"{keeps}, {'with' if decision.decided_by == 'primary' else 'without'} this query"
    if decision.relaxation is None:
        return "no action leads" if decision.margin == 0 else "this certificate defers every such query"
    leads = f"the Primary leads by {decision.margin:.4g}"
    if decision.decided_by != "primary":
        return f"{leads}, not more than the relaxation {decision.relaxation:.4g}"
    if decision.margin > decision.relaxation:
        return f"{leads}, more than the relaxation {decision.relaxation:.4g}"
    return f"{leads}, exactly the relaxation, and the draw of this id keeps its answer"


def show_estimate(estimates: list[EndpointEstimate], *, as_json: bool, **counts: Any) -> None:
    """Print the estimated calls, tokens and cost, per endpoint and in total; counts are part of the JSON document only."""
    total = sum((estimate.spent for estimate in estimates), start=Spent()).cost
    if as_json:
        print_json({"models": msgspec.to_builtins(estimates), "cost": total, **counts})
        return
    header = ["role", "endpoint", "calls", "input tokens", "output tokens", "cost"]
    rows = [
        [
            role_name(estimate.role),
            estimate.origin,
            f"{estimate.spent.calls}",
            f"{estimate.spent.input_tokens}",
            f"{estimate.spent.output_tokens}",
            dollars(estimate.spent.cost),
        ]
        for estimate in estimates
    ]
    print_table(header, rows, title="Estimate, at four characters per token and every reply at its limit")
    unpriced = ", ".join(dict.fromkeys(f"[{estimate.role}]" for estimate in estimates if estimate.spent.cost is None))
    cost = f"unknown; set price = [IN, OUT] in {unpriced}" if unpriced else f"about {dollars(total)}"
    click.echo(f"Cost: {cost}. Nothing was sent; replies that are already stored are not counted.")


class ProgressBar:
    """A progress bar on stderr: rows, rate, time left, cost so far, failures."""

    def __init__(self) -> None:
        self._bar = bars.Progress(
            bars.BarColumn(bar_width=30),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[money]}"),
            bars.TextColumn("{task.fields[failures]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=None, rate="", money="", failures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Update the bar after a row."""
        failures = ", ".join(f"{role_name(name)} {count}" for name, count in progress.failures.items())
        speed = self._bar.tasks[0].speed
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            rate="" if speed is None else f"{speed:.1f} rows/s",
            money=f"cost {dollars(progress.spent.cost)}",
            failures=f"failed: {failures}{_saved(progress)}" if failures else "",
        )


def _saved(progress: Progress) -> str:
    """Return what a floor has saved so far, after other words; nothing without one."""
    return f", not asked: {progress.not_asked}, saved {dollars(progress.saved)}" if progress.not_asked else ""


def progress_line(progress: Progress) -> None:
    """Say how far a collection has come, ten times on its way."""
    if progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
        failed, cost = sum(progress.failures.values()), dollars(progress.spent.cost)
        print_progress(f"{progress.done} of {n_rows(progress.total)}, {failed} failed, cost {cost}")


def show_collected_cascade(log: CascadeLog, output: str, *, as_json: bool) -> None:
    """Print what a collection over all models of a cascade has come to."""
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
        print_json(figures)
        return
    header = ["model", "rows without an answer", "cost"]
    rows = [
        [name, str(failures.get(name, figures["missing_guardian_rows"])), f"${cost:.4g}"]
        for name, cost in costs.items()
    ]
    print_table(header, rows, title=n_rows(len(log)))
    click.echo(
        f"Written: {output}. Next: arbitrage calibrate {output} --path --guardian-column {log.guardian} --alpha A"
    )


def _show_path_decision(decision: Decision, certificate: Certificate, actions: tuple[str, ...] | None) -> None:
    cheap = [leg for leg in decision.legs if leg.role == "primary"]
    models, _ = certificate.next_model(*chain_replies(cheap, actions), id=str(decision.id))
    models += [certificate.path.guardian] * (len(decision.legs) - len(cheap))
    print_facts(
        [
            ("answer", _answer(decision)),
            ("answered by", models[-1] if decision.decided_by != "fallback" else "the safe answer"),
            ("asked", ", ".join(models)),
            ("guarantee", _promise(decision, certificate)),
            ("id", str(decision.id)),
        ]
    )


def _answer(decision: Decision) -> str:
    return answer_text(decision.answer) if isinstance(decision.answer, Mapping) else str(decision.answer)


def _promise(decision: Decision, certificate: Certificate) -> str:
    """Return what is promised of a decision, in the terms of its certificate."""
    if decision.no_guarantee is not None:
        return f"none: {decision.no_guarantee}"
    alpha, session = as_written(certificate.alpha), isinstance(certificate.promise, PerSession)
    loss = (
        "net loss (gains counted)"
        if isinstance(certificate.loss, Net)
        else "loss of the session"
        if session
        else "loss"
    )
    if certificate.confidence is None:
        return f"expected {loss} at most {alpha}"
    sure = f"with probability {as_written(certificate.confidence)} over calibrations"
    return f"long-run {loss} of this certificate at most {alpha}, {sure}"


def role_name(role: str) -> str:
    """Return a role as people read it; a model's own name as it is."""
    return role.capitalize() if role in ("primary", "guardian") else role
