"""Routing before asking: which queries go straight to the Guardian, by their group and text alone.

To calibration a skipped query is one about which the Primary has no opinion: it is deferred, whatever the threshold. So a
Primary with a rule is just another Primary, and its certificate an ordinary one, bound to the digest of the rule.

Knows nothing of how a rule is found, nor of live models.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conformal_arbitrage.calibration.text_embedding import WIDTH, text_embedding
from conformal_arbitrage.core.arrays import Bools
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.scorelog.files import write_text
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.log import ScoreLog

VERSION = 1


class SkipRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A linear prediction of the Primary's loss from what is known before it is asked, and where to skip it.

    Attributes:
        threshold: a query is skipped if its predicted loss is this or more.
        level: the prediction for a query whose group and text say nothing.
        groups: what each group adds; a group that is not among them adds nothing.
        group_source: what names the group of a live query, such as "metadata.subject".
        text: what each column of a text's vector adds; empty if texts are not read.
        text_sha256: digest of what turns a text into a vector.
        version: of this format.
    """

    threshold: float
    level: float
    groups: dict[str, float] = {}
    group_source: str | None = None
    text: tuple[float, ...] = ()
    text_sha256: str | None = None
    version: int = VERSION

    @property
    def sha256(self) -> str:
        """Digest of the rule; part of the identity of a Primary that it stands before."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a certificate is bound to."""
        return {"skip_sha256": self.sha256} | ({"skip_group_source": self.group_source} if self.groups else {})

    def skips(self, group: str | None, text: str | None) -> bool:
        """Tell whether a query goes straight to the Guardian; so does one that lacks what the rule reads."""
        if (self.groups and not group) or (self.text and not text):
            return True
        risk = self.level + self.groups.get(group or "", 0.0)
        if self.text:
            risk = math.fsum([risk, *map(float.__mul__, self.text, text_embedding().vector(text or ""))])
        return risk >= self.threshold

    def write(self, path: str | Path) -> None:
        """Write the rule as JSON."""
        write_text(path, msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n")


def read_skip_rule(path: str | Path) -> SkipRule:
    """Read a rule.

    Raises:
        ConfigError: the file is absent or not a rule, or texts are turned into vectors in another way here.
    """
    try:
        rule = msgspec.json.decode(Path(path).read_bytes(), type=SkipRule)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a rule of `arbitrage skip` ({error}); write one with -o") from error
    numbers = (rule.threshold, rule.level, *rule.groups.values(), *rule.text)
    if rule.version != VERSION or len(rule.text) not in (0, WIDTH) or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{path}: not a rule that this release reads, version {VERSION}; run `arbitrage skip` again")
    if rule.text and text_embedding().sha256 != rule.text_sha256:
        raise ConfigError(
            f"{path}: texts become vectors in another way here ({text_embedding().sha256:.12}) than where the rule was made "
            f"({rule.text_sha256 or 'unknown':.12}); install the same packages, or run `arbitrage skip` again"
        )
    return rule


def skipped_rows(log: ScoreLog, rule: SkipRule) -> Bools:
    """Return which rows of a log go straight to the Guardian.

    Raises:
        ConfigError: the log lacks the groups or texts that the rule reads.
    """
    groups = column_texts(log, "group") if rule.groups else [""] * len(log)
    texts = [""] * len(log) if not rule.text else None if log.context is None else log.context.tolist()
    if groups is None or texts is None:
        lacking = "group" if groups is None else "context"
        raise ConfigError(f"{log.source}: there is no column '{lacking}', which the rule reads; add it")
    return np.array([rule.skips(group, text) for group, text in zip(groups, texts, strict=True)], dtype=np.bool_)


def with_skips(log: ScoreLog, rule: SkipRule) -> ScoreLog:
    """Return a log as a Primary behind a rule would have left it: no opinion, and no cost, where it is not asked."""
    skipped = skipped_rows(log, rule)
    usage, role = log.primary_usage, log.columns[0]
    cost = None if usage.cost is None else np.where(skipped, 0.0, usage.cost)
    identities = log.identities
    if identities is not None and role in identities:
        identities = {**identities, role: {**identities[role], **rule.identity}}
    return replace(
        log,
        primary=np.where(np.repeat(skipped, log.sizes), 0.0, log.primary),
        no_opinion=log.no_opinion | skipped,
        primary_usage=replace(usage, cost=cost),
        identities=identities,
    )
