"""The commands about an existing certificate: certificate show and choose."""

from pathlib import Path

import click

from conformal_arbitrage.cli import cascades, options
from conformal_arbitrage.cli.certificates import load_certificate
from conformal_arbitrage.errors import ConfigError


@click.group("certificate", cls=options.WrappingGroup)
def certificate_command() -> None:
    """Show an existing certificate, or change it within what it promises.

    \b
    arbitrage certificate show certificate.json
    arbitrage certificate choose certificate.json --alpha 0.03
    """


@certificate_command.command("show")
@click.argument("certificate")
@click.option(
    "--with-arrays", is_flag=True, help="With --json: put the arrays of a learned score in, as a gateway takes them."
)
@options.as_json
def show_command(certificate: str, *, with_arrays: bool, as_json: bool) -> None:
    """Show what a certificate holds and promises; the arrays of a learned score are checked by their digest.

    \b
    arbitrage certificate show certificate.json
    """
    from conformal_arbitrage.live.aging import luck_words

    path = cascades.load_path_certificate(certificate)
    loaded = path or load_certificate(certificate)
    if as_json:
        one = path.to_dict() if path is not None else load_certificate(certificate).to_dict(with_arrays=with_arrays)
        options.print_json(one)
        return
    luck = [] if path is not None else [("many decisions", luck_words(load_certificate(certificate)))]
    options.print_facts([*loaded.facts(), *luck])
    click.echo(f"\n{options.wrapped(loaded.summary)}\n\n{options.wrapped(loaded.guarantee)}")


@certificate_command.command("choose")
@click.argument("certificate")
@click.option(
    "--alpha", required=True, type=float, metavar="A", help="The risk budget; between stops the lower one is taken."
)
@click.option("-o", "--output", metavar="FILE", help="Write the certificate to this file.  [default: in place]")
@options.as_json
def choose_command(certificate: str, *, alpha: float, output: str | None, as_json: bool) -> None:
    """Set a dial to another budget, after looking at whatever you like.

    \b
    arbitrage calibrate log.parquet --alpha 0.05 --confidence 0.95 --dial -o certificate.json
    arbitrage certificate choose certificate.json --alpha 0.03
    """
    loaded = load_certificate(certificate)
    secret = options.project_secret(None, Path(certificate).parent, Path())
    if loaded.signed and secret is None:
        raise ConfigError(
            f"{certificate} is signed, and the project's secret that would sign the choice is not here; run this where "
            "ARBITRAGE_SECRET or arbitrage.secret is"
        )
    chosen = loaded.choose(alpha)
    chosen = chosen.sign(secret) if loaded.signed and secret is not None else chosen
    chosen.save(output or certificate)
    if chosen.alpha != alpha:
        stops = ", ".join(f"{stop.alpha:g}" for stop in loaded.dial or ())
        click.echo(f"arbitrage: {alpha:g} is not a stop of this dial ({stops}); set to {chosen.alpha:g}", err=True)
    if as_json:
        options.print_json(chosen.to_dict())
        return
    options.print_facts(chosen.facts())
    click.echo(f"\n{options.wrapped(chosen.summary)}\n\nWritten: {output or certificate}")
