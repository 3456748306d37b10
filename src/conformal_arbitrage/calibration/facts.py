"""What a certificate says to people, besides its guarantee: the facts that matter most, and the rule in two lines.

Knows nothing of files, terminals or notebooks.
"""

from typing import TYPE_CHECKING

from conformal_arbitrage.calibration.ancestry import chain_facts
from conformal_arbitrage.calibration.consistency import least_loss
from conformal_arbitrage.calibration.guarantee import summary_lines
from conformal_arbitrage.calibration.promises import as_written

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate


_AT_0 = {
    False: "the Primary's choice stands wherever it leads; ties at the top are deferred, however many there are",
    True: "the Primary's answer is given wherever its confidence is above 0",
}
_NO_RELAXATION = {
    "ok": "",
    "always_defer": "none: every query is deferred",
    "by_group": "one for each group",
    "learned": "none: a learned score decides",
}


def certificate_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    """Return what matters most as name and value pairs, for people."""
    none = _NO_RELAXATION[certificate.status]
    relaxation = none if certificate.relaxation is None else f"{certificate.relaxation:.12g}"
    relaxation += f"  ({_AT_0[certificate.router]})" if certificate.relaxation == 0 else ""
    relaxation += f"  (at this gap, draws up to {certificate.boundary_u:.6f})" if certificate.boundary_u else ""
    facts = [
        ("relaxation", relaxation),
        ("rule", f"the Guardian sees {certificate.guardian_sees}; boundary {certificate.boundary}"),
        (
            "risk budget",
            f"alpha {as_written(certificate.alpha)}, losses in [{as_written(least_loss(certificate))}, "
            f"{as_written(certificate.loss_bound)}], {certificate.n} rows",
        ),
    ]
    facts += [*_sure_facts(certificate), *_learned_facts(certificate)]
    if certificate.cluster is not None:
        sizes = f"at most {certificate.max_cluster_size} rows each"
        facts.append(("clusters", f"{certificate.clusters} by '{certificate.cluster}', {sizes}"))
    if certificate.status in ("ok", "learned"):
        gross = "" if certificate.regret is None else f" (with gains not counted {certificate.regret:.4f})"
        unused = f"unused budget {certificate.slack:.4f}"
        facts.append(("on this log", f"loss {certificate.empirical_risk:.4f}{gross}, {unused}"))
    if certificate.looked_at is not None:
        facts.append(("looked at before", certificate.looked_at))
    if certificate.ancestry is not None:
        facts += chain_facts(certificate.ancestry)
    no_opinion, missing = certificate.no_opinion_rows, certificate.missing_guardian_rows
    if no_opinion or missing:
        facts.append(("missing scores", f"Primary in {no_opinion} rows (deferred), Guardian in {missing}"))
    return facts


def _learned_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    terms = certificate.learned
    if terms is None:
        return []
    size = f"{terms.rows} rows, {terms.columns} features from {', '.join(terms.features)}"
    rounded = f"; {terms.rounded_rows} losses rounded by a draw" if terms.rounded_rows else ""
    each = f"{100 * terms.deferred:.1f} % of the rows, each decided by the others"
    return [("score", f"{certificate.score}: {size}{rounded}"), ("deferred", each)]


def _sure_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if certificate.confidence is not None:
        facts.append(
            (
                "confidence",
                f"{as_written(certificate.confidence)} that this certificate's long-run loss is at most alpha",
            )
        )
    if certificate.dial is not None:
        stops = ", ".join(as_written(stop.alpha) for stop in certificate.dial)
        facts.append(("dial", f"stops {stops}; set to {as_written(certificate.alpha)}"))
    if (source := group_source_of(certificate)) is not None:
        facts.append(("groups", f"named by {source} in live requests"))
    for name, group in (certificate.groups or {}).items():
        rule = "deferred" if group.relaxation is None else f"relaxation {group.relaxation:.12g}"
        facts.append((f"{certificate.by} {name}", f"{rule}, {group.n} rows"))
    return facts


def group_source_of(certificate: "Certificate") -> str | None:
    """Return what names the group of a live query, of a certificate by groups; None if nobody said."""
    if certificate.by is None or certificate.identities == "unbound":
        return None
    return certificate.identities.get("group", {}).get("source")


def certificate_summary(certificate: "Certificate") -> str:
    """Return the guarantee in two lines; that there is none, if so."""
    if certificate.ancestry is not None and certificate.ancestry.no_guarantee is not None:
        return f"There is no guarantee: {certificate.ancestry.no_guarantee}."
    return summary_lines(
        alpha=certificate.alpha,
        n=certificate.n,
        router=certificate.router,
        relaxation=certificate.relaxation,
        guardian_sees=certificate.guardian_sees,
        confidence=certificate.confidence,
        by=certificate.by,
        unit=certificate.unit,
        clusters=certificate.clusters,
        learned=certificate.learned is not None,
    )
