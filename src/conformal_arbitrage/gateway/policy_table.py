"""Policies in force: certificates bound to models, kept in the store, in force from the next request on.

Knows nothing of requests.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformal_arbitrage.calibration.certificate import Certificate, key_path, read_key
from conformal_arbitrage.calibration.guarantee import guarantee_text
from conformal_arbitrage.errors import ArbitrageError, CertificateError, ConfigError, RequestError
from conformal_arbitrage.live.config import Config, Form, PolicyConfig
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.upstream.base import fingerprint

_log = logging.getLogger("conformal_arbitrage.gateway")
_PROMISED = (
    "status", "alpha", "loss_bound", "n", "loss", "binarized", "guardian_sees", "boundary", "missing_guardian",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two models; scorers over menus, answerers in free text."""

    form: Form
    primary: Any
    guardian: Any

    @property
    def identities(self) -> dict[str, Any]:
        """Who makes the scores, by role."""
        return {"primary": dict(self.primary.identity), "guardian": dict(self.guardian.identity)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """One version of a policy, ready to decide; without a certificate it can only shadow."""

    name: str
    version: int
    settings: PolicyConfig
    pair: Pair
    certificate: Certificate | None
    rule: ConformalArbitrage | ConformalRouter | None
    identities_sha256: str

    @property
    def alpha(self) -> float | None:
        """The risk budget, if there is a certificate."""
        return None if self.certificate is None else self.certificate.alpha


class PolicyTable:
    """All policies in force.

    Args:
        config: names, settings and first certificates.
        store: where installed versions are kept.
        pairs: the models, by what they are asked for.
    """

    def __init__(self, config: Config, store: Store, pairs: Mapping[Form, Pair]) -> None:
        self._config = config
        self._store = store
        self._pairs = pairs
        self._keys = _keys(config)
        self._live: dict[str, LivePolicy] = {}
        self._unusable: dict[str, ArbitrageError] = {}
        self._newest: dict[str, int] = {}  # also of those that cannot be used
        self._aliases = {alias: name for name, p in config.policies.items() for alias in (*p.aliases, name)}
        self._seen = -1

    async def load(self) -> None:
        """Bring the store and the configuration together; a certificate file that the store lacks is installed."""
        for name, settings in self._config.policies.items():
            if settings.certificate is None:
                self._live[name] = self._without_certificate(name)
                continue
            made = Certificate.load(Path(self._config.folder) / settings.certificate).to_dict()
            history = await self._store.policy_history(name)
            if all(version.certificate != made for version in history):
                self.bind(name, made)
                await self._store.install(name, made, by="configuration")
        await self.refresh(await self._store.change_count())
        for error in self._unusable.values():
            raise error

    def _without_certificate(self, name: str) -> LivePolicy:
        settings = self._config.policies[name]
        if settings.mode != "shadow":
            raise ConfigError(f"[policies.{name}] without a certificate can only shadow; set mode or certificate")
        pair = self._pairs[self._config.form_of(name)]
        return LivePolicy(
            name=name, version=0, settings=settings, pair=pair, certificate=None, rule=None,
            identities_sha256=fingerprint(pair.identities),
        )  # fmt: skip

    async def refresh(self, count: int) -> None:
        """Take up what was installed before the store's change count was this, by this gateway or another.

        A version that cannot be used here, such as one that another gateway installed for other models, takes its policy
        out of service; the others go on.
        """
        if count <= self._seen:
            return
        for version in await self._store.policies():
            if version.name in self._config.policies:
                self._take_up(version)
        self._seen = max(self._seen, count)  # another refresh may have seen more meanwhile

    def _take_up(self, version: PolicyVersion) -> None:
        """Put a version in force, unless a later one was seen, be it unusable."""
        if version.version <= self._newest.get(version.name, 0):
            return
        self._newest[version.name] = version.version
        self._live.pop(version.name, None)
        self._unusable.pop(version.name, None)
        try:
            self._live[version.name] = self.bind(version.name, version.certificate, version.version)
        except ArbitrageError as error:
            self._unusable[version.name] = error
            _log.error("policy %s is out of service: %s", version.name, error)

    def bind(self, name: str, document: Mapping[str, Any], version: int = 0) -> LivePolicy:
        """A certificate with the models of a policy: its sentence, its key and its identities are checked.

        Raises:
            CertificateError: it cannot be used with them.
        """
        settings = self._config.policies[name]
        bound = Certificate.from_dict(dict(document), source=f"policy {name}")
        promised = guarantee_text(**{field: getattr(bound, field) for field in _PROMISED})
        if bound.guarantee != promised:
            raise CertificateError(f"policy {name}: the certificate's sentence is not the one its fields give")
        if bound.key_sha256 is not None:
            key = self._keys.get(bound.key_sha256)
            if key is None:
                raise CertificateError(
                    f"policy {name}: this gateway does not hold the key behind the certificate's draws"
                )
            bound = Certificate.from_dict(dict(document), key=key)
        pair = self._pairs[self._config.form_of(name)]
        return LivePolicy(
            name=name, version=version, settings=settings, pair=pair, certificate=bound,
            rule=self._rule(settings, bound, pair), identities_sha256=fingerprint(pair.identities),
        )  # fmt: skip

    def _rule(
        self, settings: PolicyConfig, certificate: Certificate, pair: Pair
    ) -> ConformalArbitrage | ConformalRouter:
        task = self._config.task
        shared: dict[str, Any] = {"primary": pair.primary, "guardian": pair.guardian, "certificate": certificate}
        if pair.form == "menu":
            return ConformalArbitrage(**shared, safe_action=task.safe_action, allow=settings.allow)
        return ConformalRouter(**shared, safe_answer=task.safe_answer, allow=settings.allow)

    def named(self, model: str) -> LivePolicy:
        """The policy that a request's model names.

        Raises:
            RequestError: there is none.
        """
        name = self._aliases.get(model, "")
        live = self._live.get(name)
        if name in self._unusable:
            raise RequestError(
                f"policy {name} is out of service: its certificate does not go with the models of this gateway",
                status=503, code="policy_unusable", param="model",
            )  # fmt: skip
        if live is None:
            known = ", ".join(self._live)
            raise RequestError(
                f"there is no policy {model!r:.80}; there are {known}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return live

    def exposes_all(self, name: str) -> bool:
        """Whether callers may see relaxation and margin of a policy's decisions."""
        settings = self._config.policies.get(name)
        return settings is not None and settings.expose == "full"

    def all(self) -> list[LivePolicy]:
        """Every policy in force."""
        return list(self._live.values())

    async def install(
        self, name: str, certificate: Mapping[str, Any], *, by: str, dry_run: bool
    ) -> PolicyVersion | None:
        """Install a certificate, checked against the models; None after a dry run."""
        self._known(name)
        self._check(name, certificate)
        if dry_run:
            return None
        made = await self._store.install(name, certificate, by=by)
        self._take_up(made)
        return made

    async def rollback(self, name: str, *, by: str) -> PolicyVersion:
        """Go back to the version before the active one, if it goes with the models."""
        self._known(name)
        history = {version.version: version for version in await self._store.policy_history(name)}
        earlier = history.get(history[max(history)].origin - 1) if history else None
        if earlier is not None:
            self._check(name, earlier.certificate)
        made = await self._store.rollback(name, by=by)
        if made is None:
            raise RequestError(f"policy {name} has no earlier version", status=409, code="nothing_to_roll_back")
        self._take_up(made)
        return made

    def _check(self, name: str, certificate: Mapping[str, Any]) -> None:
        try:
            self.bind(name, certificate)
        except ArbitrageError as error:
            raise RequestError(str(error), status=422, code="certificate_refused") from error

    def _known(self, name: str) -> None:
        if name not in self._config.policies:
            raise RequestError(f"there is no policy {name!r:.80}", status=404, code="model_not_found")


def _keys(config: Config) -> dict[str, bytes]:
    """The keys beside the configured certificates, by digest."""
    found: dict[str, bytes] = {}
    for settings in config.policies.values():
        if settings.certificate is None:
            continue
        path = key_path(Path(config.folder) / settings.certificate)
        if path.exists():
            key = read_key(path)
            found[hashlib.sha256(key).hexdigest()] = key
    return found


def check_policies(config: Config) -> None:
    """Refuse a configuration that names no policy, or one name twice."""
    if not config.policies:
        raise ConfigError("the configuration has no section [policies.NAME] with a certificate; add one")
    names = [alias for name, settings in config.policies.items() for alias in (name, *settings.aliases)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{min(twice)!r} names two policies; give each name and alias once")
