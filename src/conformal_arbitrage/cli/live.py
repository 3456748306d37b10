"""init, check, collect, ask: live models."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.errors import OutputError

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.collect import Estimated, Progress
    from conformal_arbitrage.collecting.questions import Menus, Requests
    from conformal_arbitrage.live.config import Config
    from conformal_arbitrage.live.probe import Found
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.types import Decision

config_file = click.option(
    "--config", default="arbitrage.toml", show_default=True, metavar="FILE", help="The configuration."
)


@click.command()
@click.option("--form", type=click.Choice(["menu", "text"]), default="menu", show_default=True)
@click.option("-o", "--output", default="arbitrage.toml", show_default=True, metavar="FILE")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(*, form: Any, output: str, force: bool) -> None:
    """Write a short commented configuration to start from.

    \b
    arbitrage init
    arbitrage init --form text
    """
    from conformal_arbitrage.live.config import template
    from conformal_arbitrage.scorelog.files import write_text

    if Path(output).exists() and not force:
        raise OutputError(f"{output}: is there already; give another name with -o, or --force")
    write_text(output, template(form))
    click.echo(f"Written: {output}. Set models and prices there, export the keys it names, then run `arbitrage check`.")


@click.command()
@config_file
@options.as_json
def check(*, config: str, as_json: bool) -> None:
    """Ask each model something tiny, find out how it wants to be asked, and pin that in the configuration.

    \b
    arbitrage check
    """
    import msgspec

    from conformal_arbitrage.live.config import read_config, write_pinned
    from conformal_arbitrage.live.probe import check_models

    found = asyncio.run(check_models(read_config(config)))
    fit = all(one.problem is None for one in found)
    pinned = {one.role: one.pinned for one in found if one.pinned is not None}
    if fit and pinned:
        write_pinned(config, pinned)
    if as_json:
        options.print_json({"ok": fit, "models": msgspec.to_builtins(found)})
    else:
        _show_found(found)
        if fit and pinned:
            click.echo(f"Written: {config} ([{'.pinned], ['.join(pinned)}.pinned])")
    if not fit:
        problems = "; ".join(f"[{one.role}] {one.problem}" for one in found if one.problem)
        raise click.ClickException(f"this configuration cannot be used: {problems}")


def _show_found(found: "list[Found]") -> None:
    from conformal_arbitrage.upstream.pricing import dollars

    header = ["model", "kind", "answers", "served", "seconds", "cost", "asked by", "logprobs"]
    rows = [
        [
            one.role,
            one.kind,
            "no" if one.problem else "yes",
            one.served or one.model or "",
            f"{one.seconds:.2f}",
            dollars(one.spent.cost) if one.priced else "unknown",
            "" if one.pinned is None else one.pinned.mode,
            {None: "", True: "yes", False: "no"}[one.logprobs],
        ]
        for one in found
    ]
    options.print_table(header, rows)
    for one in found:
        for note in one.notes:
            click.echo(f"  {one.role}: {note}")


@click.command()
@click.argument("questions")
@click.option("-o", "--output", required=True, metavar="FILE", help="The score log; replies are kept beside it.")
@click.option("--form", type=click.Choice(["menu", "text"]), help="Options or free text.  [default: as configured]")
@config_file
@click.option("--question-column", metavar="NAME", help="The question.  [default: question; text form: messages]")
@click.option("--choice-columns", metavar="A,B,...", help="One column per option.")
@click.option("--choices-column", metavar="NAME", help="A column with the list of options.  [default: choices]")
@click.option("--answer-column", metavar="NAME", help="The right option, or in text form what a grader compares with.")
@click.option("--answer-is", type=click.Choice(["letter", "index", "text"]), help="How answers name an option.")
@click.option("--id-column", metavar="NAME", help="Unique names.  [default: id, or made from the content]")
@click.option("--group-column", metavar="NAME", help="Subject, tenant, language.")
@click.option("--shuffle-options", is_flag=True, help="Put the options in an order drawn from the question's hash.")
@click.option(
    "--grade", metavar="HOW", help="Text form: exact, regex, json-equal, judge, human, python:MODULE:FUNCTION."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first rows.")
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Upstream calls at once.")
@click.option("--dry-run", is_flag=True, help="Send nothing; say what the bill would be.")
@click.option(
    "--max-cost", type=click.FloatRange(0, min_open=True), metavar="$", help="Stop before exceeding this bill."
)
@options.as_json
def collect(questions: str, *, output: str, config: str, dry_run: bool, as_json: bool, **asked: Any) -> None:
    """Ask both models about every row and write a score log. Stopped, it goes on where it was.

    \b
    arbitrage collect questions.jsonl -o log.parquet --dry-run
    arbitrage collect questions.csv -o log.parquet --choice-columns A,B,C,D --answer-column answer --max-cost 5.00
    arbitrage collect requests.jsonl -o log.parquet --form text --grade json-equal
    """
    from conformal_arbitrage.collecting.collect import Collection
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.scorelog.files import file_format, writable

    options.refuse_same(questions, output)
    file_format(Path(output))
    writable(output)
    plan = Collection(
        config=_as_asked(read_config(config), config, asked),
        rows=_read_rows(questions, asked["form"], asked),
        output=output,
        grade=asked["grade"],
        concurrency=asked["concurrency"],
        max_cost=asked["max_cost"],
    )
    if dry_run:
        show_estimate(asyncio.run(plan.estimate()), as_json=as_json)
        return
    with nullcontext(None) if as_json or plan.has_person else _Bar() as bar:
        try:
            log = asyncio.run(plan.run(None if bar is None else bar.show))
        except KeyboardInterrupt as error:
            raise click.ClickException(
                "stopped; what was answered is kept, the same command goes on from there"
            ) from error
    log.write(output)
    _show_collected(log, output, as_json=as_json)


def _as_asked(config: "Config", path: str, asked: dict[str, Any]) -> "Config":
    """The configuration with the options of this call; sets the form they left open."""
    from conformal_arbitrage.live.config import with_task

    asked["form"] = asked["form"] or config.task.form
    shuffle = config.task.shuffle_options or asked["shuffle_options"]
    return with_task(config, path, form=asked["form"], shuffle_options=shuffle)


def _read_rows(questions: str, form: str, asked: dict[str, Any]) -> "Menus | Requests":
    from conformal_arbitrage.collecting.questions import read_menus, read_requests

    shared = {name: asked[name] for name in ("answer_column", "id_column", "group_column")}
    if form == "text":
        return read_requests(questions, question_column=asked["question_column"], **shared).first(asked["limit"])
    columns = tuple(name.strip() for name in (asked["choice_columns"] or "").split(",") if name.strip())
    return read_menus(
        questions,
        question_column=asked["question_column"] or "question",
        choice_columns=columns,
        choices_column=asked["choices_column"] or "choices",
        answer_is=asked["answer_is"],
        **shared,
    ).first(asked["limit"])


class _Bar:
    """A progress bar on stderr: rows, rate, time left, money so far, failures."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            TextColumn("{task.fields[money]}"), TextColumn("{task.fields[failures]}"),
            console=Console(stderr=True), refresh_per_second=4,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, rate="", money="", failures="")

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: "Progress") -> None:
        """One more row."""
        from conformal_arbitrage.upstream.pricing import dollars

        speed = self._bar.tasks[0].speed
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            rate="" if speed is None else f"{speed:.1f} rows/s",
            money=f"cost {dollars(progress.spent.cost)}",
            failures=f"failed: Primary {progress.primary_failures}, Guardian {progress.guardian_failures}",
        )


def show_estimate(estimates: "list[Estimated]", *, as_json: bool) -> None:
    """What calls would take, per endpoint and in all."""
    import msgspec

    from conformal_arbitrage.upstream.pricing import dollars

    costs = [one.spent.cost for one in estimates]
    total = None if None in costs else sum(cost for cost in costs if cost is not None)
    if as_json:
        options.print_json({"models": msgspec.to_builtins(estimates), "cost": total})
        return
    header = ["endpoint", "calls", "input tokens", "output tokens", "cost"]
    rows = [
        [
            one.origin,
            f"{one.spent.calls}",
            f"{one.spent.input_tokens}",
            f"{one.spent.output_tokens}",
            dollars(one.spent.cost),
        ]
        for one in estimates
    ]
    options.print_table(header, rows, title="Expected, at four characters a token and every reply at its limit")
    bill = "unknown, since a price is; set price = [IN, OUT]" if total is None else f"about {dollars(total)}"
    click.echo(f"Bill: {bill}. Nothing was sent; replies that are stored already are not counted.")


def _show_collected(log: "ScoreLog", output: str, *, as_json: bool) -> None:
    from conformal_arbitrage.collecting.collect import replies_path, summary
    from conformal_arbitrage.upstream.pricing import dollars
    from conformal_arbitrage.upstream.wrappers import stored_cost

    found = summary(log)
    known, unknown = stored_cost(replies_path(output))
    found["cost"] = None if unknown else known
    if as_json:
        options.print_json({**found, "output": output, "replies": str(replies_path(output))})
        return
    for role in ("primary", "guardian"):
        failed, cost = found[f"{role}_failures"], found[f"{role}_cost"]
        click.echo(f"{role}: {found['rows']} rows, {failed} failed, cost {dollars(cost)}")
    click.echo(f"all replies, graders' and earlier runs' included: cost {dollars(found['cost'])}")
    if found["missing_guardian_rows"]:
        options.warn(
            f"{found['missing_guardian_rows']} rows have no Guardian score: run the same command again to repeat the calls "
            "that failed (a reply that came and cannot be read is kept, and not asked for again), or calibrate with "
            "--missing-guardian worst_case; the column guardian_error says why"
        )
    click.echo(f"Written: {output}; raw replies in {replies_path(output)}")


@click.command()
@click.argument("certificate")
@click.argument("question")
@click.option("--action", "actions", multiple=True, metavar="TEXT", help="An option; give several. None in text form.")
@click.option("--id", "name", metavar="ID", help="The query's id; drawn unless given.")
@config_file
@options.key_file
@click.option("--allow", multiple=True, metavar="NAME", help="Put up with this difference; gives up the guarantee.")
@options.as_json
def ask(
    certificate: str,
    question: str,
    *,
    actions: tuple[str, ...],
    name: str | None,
    config: str,
    key_file: str | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """One live decision: who decided, why, and what it cost.

    
    arbitrage ask certificate.json "Which planet is the largest?" --action Jupiter --action Saturn
    arbitrage ask certificate.json "Summarise: ..."          text form
    """
    from conformal_arbitrage.calibration.certificate import Certificate, key_path, read_key
    from conformal_arbitrage.live.build import Models
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.types import ChatRequest, Query

    beside = key_path(certificate)
    rule = Certificate.load(certificate, key=read_key(key_file) if key_file else None)
    if rule.key_sha256 is not None and rule.key is None and beside.exists():
        rule = Certificate.load(certificate, key=read_key(beside))
    read = read_config(config)
    if bool(actions) != (read.task.form == "menu"):
        raise click.UsageError(
            f"{config} is in {read.task.form} form: "
            + ("give --action for each option" if not actions else "drop --action")
        )

    async def decide() -> "Decision":
        async with Models(read) as models:
            if actions:
                return await models.policy(rule, allow).decide(Query(question, actions, id=name))
            body = {"messages": [{"role": "user", "content": question}]}
            return await models.router(rule, allow).decide(ChatRequest(body, id=name))

    decision = asyncio.run(decide())
    if as_json:
        options.print_json(decision_json(decision))
    else:
        _show_decision(decision, rule.alpha)


def decision_json(decision: "Decision") -> dict[str, Any]:
    """A decision as a JSON document; an infinite margin (a single action) is null."""
    from math import isinf

    import msgspec
    from msgspec import structs

    margin = None if isinf(decision.margin) else decision.margin
    return msgspec.to_builtins({**structs.asdict(decision), "margin": margin, "spent": decision.spent})


def _show_decision(decision: "Decision", alpha: float) -> None:
    import json

    from conformal_arbitrage.upstream.pricing import dollars

    answer = decision.answer if isinstance(decision.answer, str) else json.dumps(decision.answer, ensure_ascii=False)
    facts = [
        ("answer", str(answer)),
        ("decided by", decision.decided_by),
        ("why", _why(decision)),
        (
            "guarantee",
            f"expected loss at most {alpha:g}" if decision.no_guarantee is None else f"none: {decision.no_guarantee}",
        ),
        ("cost", dollars(decision.spent.cost)),
    ]
    facts += [
        (
            leg.role,
            f"{leg.seconds:.2f} s, cost {dollars(leg.spent.cost)}" + (f", failed: {leg.error}" if leg.error else ""),
        )
        for leg in decision.legs
    ]
    options.print_facts([*facts, ("id", str(decision.id))])


def _why(decision: "Decision") -> str:
    """What the rule saw."""
    if len(decision.candidates) == 1 and not decision.legs:
        return "there is one action only"
    if any(leg.role == "primary" and leg.error for leg in decision.legs):
        return "the Primary failed, so it has no opinion"
    if decision.relaxation is None:
        return "this certificate defers every query"
    leads = f"the Primary leads by {decision.margin:.4g}"
    if decision.decided_by != "primary":
        return f"{leads}, not more than the relaxation {decision.relaxation:.4g}"
    if decision.margin > decision.relaxation:
        return f"{leads}, more than the relaxation {decision.relaxation:.4g}"
    return f"{leads}, exactly the relaxation, and the draw of this id lets it stand"
