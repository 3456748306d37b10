"""The policies in force: certificates bound to models. A new version in the store takes effect with the next request.

Knows nothing of requests.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import refusal, refuse_combination
from conformal_arbitrage.calibration.key_files import key_path, read_key
from conformal_arbitrage.calibration.path_certificate import PathCertificate, is_path_document
from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.errors import ArbitrageError, CertificateError, ConfigError, RequestError
from conformal_arbitrage.gateway.audit_rows import LossFacts, WatchedPolicy
from conformal_arbitrage.gateway.cascades import (
    cascade_features,
    certificate_document,
    chooser_of_cascade,
    router_of_cascade,
    served_cascade,
)
from conformal_arbitrage.gateway.upkeep import is_guarded
from conformal_arbitrage.live.binding import check_group_source
from conformal_arbitrage.live.build import bind_menu, bind_text
from conformal_arbitrage.live.cascade import CascadeRule
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter
from conformal_arbitrage.live.watching import deferring, watchable
from conformal_arbitrage.scorers.base import Answerer, Identity, Scorer
from conformal_arbitrage.scorers.kinds import Form
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.ledger_base import LedgerKey
from conformal_arbitrage.store.record import AlarmBody, JSONObject
from conformal_arbitrage.upstream.base import fingerprint

_log = logging.getLogger("conformal_arbitrage.gateway")
ServingMode = Literal["enforce", "shadow", "safe"]
UNSIGNED = "unsigned"
"""The name that lets a policy use a certificate without this project's signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuPair:
    """The two models over menus; of a cascade the Primary is its first model, and `models` has all before the Guardian."""

    primary: Scorer
    guardian: Scorer
    models: Mapping[str, Scorer] = field(default_factory=dict[str, Scorer])
    guardian_name: str = "guardian"
    form: ClassVar[Form] = "menu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """The two models in free text; for a cascade as in `MenuPair`."""

    primary: Answerer
    guardian: Answerer
    models: Mapping[str, Answerer] = field(default_factory=dict[str, Answerer])
    guardian_name: str = "guardian"
    form: ClassVar[Form] = "text"


ModelPair = MenuPair | TextPair


def identities_of_pair(pair: ModelPair) -> dict[str, Identity]:
    """Return the identities of both models by role, or of all models of a cascade by name."""
    if pair.models:
        return {
            **{name: dict(one.identity) for name, one in pair.models.items()},
            pair.guardian_name: dict(pair.guardian.identity),
        }
    return {"primary": dict(pair.primary.identity), "guardian": dict(pair.guardian.identity)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """One version of a policy, ready to decide; without a certificate it can only run in shadow mode.

    Attributes:
        certificate: what was installed, whatever the mode.
        rule: what decides; in safe mode it defers everything.
        alpha: the certificate's risk budget; None without one.
        mode: as configured, or "safe" while an alarm stands.
        guarantee: what the certificate promises: on average over calibrations, or with high probability.
        forfeited: why no decision has a guarantee, whatever the models; None if nothing else stands against one.
        lifts: how often alarms of this version were lifted.
        alarm: the one that stands.
        watched: what its monitor needs to know; None without a monitor.
        unwatched: why there is none.
        guarded: how many known losses the threshold in force rests on; None without a guard.
        installed: when, in seconds since 1970.
        expired: whether it has been in force for longer than max_age.
    """

    name: str
    version: int
    settings: PolicyConfig
    pair: ModelPair
    certificate: Certificate | None
    rule: ConformalArbitrage | ConformalRouter | CascadeRule | None
    identities_sha256: str
    alpha: float | None
    mode: ServingMode
    guarantee: Literal["crc", "high_probability"] = "crc"
    forfeited: str | None = None
    lifts: int = 0
    alarm: AlarmBody | None = None
    watched: WatchedPolicy | None = None
    unwatched: str | None = None
    guarded: int | None = None
    installed: float = 0.0
    expired: bool = False


class PolicyTable:
    """All policies in force.

    Args:
        config: names, settings and initial certificates.
        store: where installed versions are kept.
        pairs: the models, by policy.
        secret: the project's; certificates must be signed with it.
    """

    def __init__(self, config: Config, store: Store, pairs: Mapping[str, ModelPair], secret: ProjectSecret) -> None:
        self._config = config
        self._store = store
        self._pairs = pairs
        self._secret = secret
        self._keys = _keys(config)
        self._live: dict[str, LivePolicy] = {}
        self._unusable: dict[str, ArbitrageError] = {}
        self._newest: dict[str, tuple[int, int, bool]] = {}  # version, lifts, alarm; unusable ones included
        self._aliases = {alias: name for name, p in config.policies.items() for alias in (*p.aliases, name)}
        self._seen = -1

    async def load(self) -> None:
        """Install each certificate file that changed since the last start, and load the policies in force."""
        for name, settings in self._config.policies.items():
            if settings.certificate is None:
                self._live[name] = self._without_certificate(name)
            else:
                await self._install_file(name, settings.certificate)
        await self.refresh(await self._store.change_count())
        for error in self._unusable.values():
            raise error
        for version in await self._store.policies():
            if version.name in self._live:
                _log.info("%s", self._in_force(version), extra={"policy": version.name})

    async def _install_file(self, name: str, file: str) -> None:
        """Install a certificate file that differs from the one that the last start found.

        One that is the same has been installed, and what was installed after it stays in force. A store without a note of
        the last start, as of an earlier release, takes a file that it has never had.
        """
        document = certificate_document(Path(self._config.folder) / file)
        sha256 = fingerprint(document)
        last = await self._store.configured(name)
        history = await self._store.policy_history(name)
        known = any(version.certificate == document for version in history)
        changed = sha256 != last and (last is not None or not known)
        active = bool(history) and history[0].intact and history[0].certificate == document
        if not history or (changed and not active):
            self.bind(name, document)
            await self._store.install(name, document, by="configuration")
        if sha256 != last:
            await self._store.note_configured(name, sha256)

    def _in_force(self, version: PolicyVersion) -> str:
        """Return which version a start puts in force, and why not the certificate file if it is another."""
        file = self._config.policies[version.name].certificate
        named = f"version {version.version} is in force"
        if file is None:
            return f"{named}, installed by {version.installed_by}"
        if certificate_document(Path(self._config.folder) / file) == version.certificate:
            return f"{named}, the certificate file {file}"
        return (
            f"{named}, installed by {version.installed_by}; the certificate file {file} is not, since it is unchanged since "
            "the last start"
        )

    def _without_certificate(self, name: str) -> LivePolicy:
        settings = self._config.policies[name]
        if settings.mode != "shadow":
            raise ConfigError(f'[policies.{name}] needs a certificate, or mode = "shadow"')
        pair = self._pairs[name]
        return LivePolicy(
            name=name, version=0, settings=settings, pair=pair, certificate=None, rule=None,
            identities_sha256=fingerprint(identities_of_pair(pair)), alpha=None, mode="shadow",
            unwatched="there is no certificate yet",
        )  # fmt: skip

    async def refresh(self, count: int) -> None:
        """Put in force what this gateway or another has installed.

        A version that cannot be used here, such as one for other models, takes its policy out of service; the others
        stay in service.

        Args:
            count: the store's change count; an earlier one changes nothing.
        """
        if count <= self._seen:
            return
        for version in await self._store.policies():
            if version.name in self._config.policies:
                self._put_in_force(version)
        self._seen = max(self._seen, count)  # a concurrent refresh may have seen more

    def _put_in_force(self, version: PolicyVersion) -> None:
        """Put a version in force as it stands, unless a later state of the policy has been seen, usable or not."""
        state = (version.version, version.lifts, version.alarm is not None)
        if state <= self._newest.get(version.name, (0, 0, False)):
            return
        self._newest[version.name] = state
        self._live.pop(version.name, None)
        self._unusable.pop(version.name, None)
        try:
            _check_intact(version)
            self._live[version.name] = self.bind(version.name, version.certificate, version)
        except ArbitrageError as error:
            self._unusable[version.name] = error
            _log.error("out of service: %s", error, extra={"policy": version.name})

    def bind(self, name: str, document: JSONObject, version: PolicyVersion | None = None) -> LivePolicy:
        """Bind a certificate to the models of a policy; its guarantee, its key and its identities are checked.

        Args:
            name: the policy's.
            document: the certificate.
            version: which is to be put in force; None to check only.

        Raises:
            CertificateError: it cannot be used with them.
            OptionError: the policy's alarm_line has no proof for it.
        """
        settings = self._config.policies[name]
        if settings.cascade or is_path_document(dict(document)):
            return self._bind_cascade(name, document, version)
        bound = Certificate.from_dict(dict(document), source=f"policy {name}")
        check_group_source(bound, settings.group, policy=name)
        given_up = None if bound.ancestry is None else bound.ancestry.no_guarantee
        forfeited = self._check_signature(name, bound) or given_up or voided(version)
        bound = self._with_key(name, bound)
        if bound.learned is not None:
            bound.learned_score().rule()  # fitted now, not with the first request
        pair = self._pairs[name]
        safe = version is not None and version.alarm is not None and settings.mode == "enforce"
        live = LivePolicy(
            name=name,
            version=0 if version is None else version.version,
            settings=settings,
            pair=pair,
            certificate=bound,
            rule=self._rule(settings, deferring(bound) if safe else bound, pair, forfeited),
            identities_sha256=fingerprint(identities_of_pair(pair)),
            alpha=bound.alpha,
            mode="safe" if safe else settings.mode,
            guarantee="crc" if bound.confidence is None else "high_probability",
            forfeited=forfeited,
            lifts=0 if version is None else version.lifts,
            installed=0.0 if version is None else version.installed,
            alarm=None if version is None else version.alarm,
            unwatched="in shadow mode the Guardian decides",
        )
        live = live if settings.mode == "shadow" else _watched(live, bound)
        return replace(live, guarded=0) if is_guarded(live, bound) else live

    def swap(self, old: LivePolicy, new: LivePolicy) -> None:
        """Put a policy in force in the place of another from the next request on, unless that was replaced meanwhile."""
        if self._live.get(old.name) is old:
            self._live[old.name] = new

    def _bind_cascade(self, name: str, document: JSONObject, version: PolicyVersion | None) -> LivePolicy:
        """Bind the certificate of a cascade to its models; it has no monitor, since that has no proof for it."""
        settings, pair, task = self._config.policies[name], self._pairs[name], self._config.task
        for feature in cascade_features(settings):
            refuse_combination(feature, "path")
        bound = served_cascade(name, document, cascade=settings.cascade)
        forfeited = self._check_signature(name, bound) or voided(version)
        parts = (pair.guardian_name, bound.with_key_of(self._secret), task)
        if isinstance(pair, MenuPair):
            rule = chooser_of_cascade(pair.models, pair.guardian, *parts, allow=settings.allow, forfeited=forfeited)
        else:
            rule = router_of_cascade(pair.models, pair.guardian, *parts, allow=settings.allow, forfeited=forfeited)
        return LivePolicy(
            name=name,
            version=0 if version is None else version.version,
            settings=settings,
            pair=pair,
            certificate=None,
            rule=rule,
            identities_sha256=fingerprint(identities_of_pair(pair)),
            alpha=bound.alpha,
            mode=settings.mode,
            forfeited=forfeited,
            installed=0.0 if version is None else version.installed,
            unwatched=refusal("monitor", "path"),
        )

    def _check_signature(self, name: str, certificate: Certificate | PathCertificate) -> str | None:
        """Return why decisions have no guarantee: an unsigned certificate, allowed by name; None if it is signed."""
        try:
            certificate.check_signature(self._secret, source=f"policy {name}")
        except CertificateError as error:
            if UNSIGNED in self._config.policies[name].allow:
                return f"allowed by name: {UNSIGNED} (who made the certificate cannot be checked)"
            remedy = f'or continue without a guarantee: allow = ["{UNSIGNED}"] in [policies.{name}]'
            raise CertificateError(f"{error}; {remedy}") from error
        return None

    def _with_key(self, name: str, certificate: Certificate) -> Certificate:
        """Return a certificate with the key behind its draws: a subkey of the secret, or a file of earlier releases."""
        keyed = certificate.with_key_of(self._secret)
        if keyed.key_sha256 is None or keyed.key is not None:
            return keyed
        if keyed.key_sha256 not in self._keys:
            raise CertificateError(f"policy {name}: this gateway does not hold the key behind the certificate's draws")
        return Certificate.from_dict(keyed.to_dict(with_arrays=True), key=self._keys[keyed.key_sha256])

    def _rule(
        self, settings: PolicyConfig, certificate: Certificate, pair: ModelPair, forfeited: str | None
    ) -> ConformalArbitrage | ConformalRouter:
        allow, source = settings.allow, settings.group
        if isinstance(pair, MenuPair):
            bound = bind_menu(self._config, certificate, pair.primary, pair.guardian, allow=allow, group_source=source)
        else:
            idle = None if settings.sticky is None else settings.session_idle
            bound = bind_text(
                self._config,
                certificate,
                pair.primary,
                pair.guardian,
                allow=allow,
                session_idle=idle,
                group_source=source,
            )
        return bound if forfeited is None else replace(bound, forfeited=forfeited)

    def named(self, model: str) -> LivePolicy:
        """Return the policy that a request's model names.

        Raises:
            RequestError: there is none, or it is out of service.
        """
        name = self._aliases.get(model, "")
        live = self._live.get(name)
        if name in self._unusable:
            raise RequestError(
                f"policy {name} is out of service: its certificate was made for other models, is not signed with this "
                "gateway's secret, or was changed in the store",
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
        """Return whether callers may see the relaxation and margins of a policy."""
        settings = self._config.policies.get(name)
        return settings is not None and settings.expose == "full"

    def lets_callers_grade(self, name: str) -> bool:
        """Return whether callers may grade both answers to their own requests."""
        settings = self._config.policies.get(name)
        return settings is not None and settings.callers_grade

    def all(self) -> list[LivePolicy]:
        """Return every policy in force."""
        return list(self._live.values())

    def out_of_service(self) -> dict[str, ArbitrageError]:
        """Return why policies are out of service, by name."""
        return dict(self._unusable)

    async def install(self, name: str, certificate: JSONObject, *, by: str, dry_run: bool) -> PolicyVersion | None:
        """Install a certificate after checking it against the models; return None after a dry run."""
        self._known(name)
        self._check(name, certificate)
        if dry_run:
            return None
        version = await self._store.install(name, certificate, by=by)
        self._put_in_force(version)
        return version

    async def rollback(self, name: str, *, by: str) -> PolicyVersion:
        """Go back to the version before the active one, if it fits the models."""
        self._known(name)
        history = {version.version: version for version in await self._store.policy_history(name)}
        earlier = history.get(history[max(history)].origin - 1) if history else None
        if earlier is not None:
            self._check(name, earlier.certificate)
            self._check_history(earlier)
        version = await self._store.rollback(name, by=by)
        if version is None:
            raise RequestError(f"policy {name} has no earlier version", status=409, code="nothing_to_roll_back")
        self._put_in_force(version)
        return version

    def _check(self, name: str, certificate: JSONObject) -> None:
        try:
            self.bind(name, certificate)
        except ArbitrageError as error:
            raise RequestError(str(error), status=422, code="certificate_refused") from error

    def _check_history(self, version: PolicyVersion) -> None:
        try:
            _check_intact(version)
        except CertificateError as error:
            raise RequestError(str(error), status=422, code="certificate_refused") from error

    def _known(self, name: str) -> None:
        if name not in self._config.policies:
            raise RequestError(f"there is no policy {name!r:.80}", status=404, code="model_not_found")


def voided(version: PolicyVersion | None) -> str | None:
    """Return why a certificate's promise is void: an alarm on it was lifted without a new certificate; None if it is not."""
    if version is None or version.alarmed is None:
        return None
    if version.lifts:
        return "an alarm was lifted without a new certificate"
    if version.alarm is None:
        return f"an alarm was raised on this certificate, under version {version.alarmed.version}"
    return None


def _watched(live: LivePolicy, certificate: Certificate) -> LivePolicy:
    """Return a policy with what its monitor needs to know, or with why it has none."""
    lines, reason = watchable(certificate, live.settings.alarm_line)
    if lines is None:
        return replace(live, unwatched=reason)
    key = LedgerKey(policy=live.name, version=live.version, lifts=live.lifts, identities_sha256=live.identities_sha256)
    by_people = live.pair.guardian.identity.get("kind") == "human"
    watched = WatchedPolicy(key=key, lines=lines, facts=LossFacts.of(certificate), by_people=by_people)
    return replace(live, watched=watched, unwatched=None)


def _check_intact(version: PolicyVersion) -> None:
    """Refuse a version that is not what was installed.

    Raises:
        CertificateError: it was changed in the store, or a later version was removed.
    """
    if not version.intact:
        raise CertificateError(
            f"policy {version.name}, version {version.version}: it is not what was installed last; run `arbitrage records "
            "verify`, then restore a backup, or put another certificate file in place and start again"
        )


def _keys(config: Config) -> dict[str, bytes]:
    """Return the keys beside the configured certificates, by digest."""
    keys: dict[str, bytes] = {}
    for settings in config.policies.values():
        if settings.certificate is None:
            continue
        path = key_path(Path(config.folder) / settings.certificate)
        if path.exists():
            key = read_key(path)
            keys[hashlib.sha256(key).hexdigest()] = key
    return keys


def check_policies(config: Config) -> None:
    """Check that a configuration has policies, that no name or alias stands for two, and that sessions are possible.

    Raises:
        ConfigError: it has none, or a name does, or a policy of menus is to decide by session.
    """
    if not config.policies:
        raise ConfigError("the configuration has no policy; add a section [policies.NAME] with a certificate")
    names = [alias for name, settings in config.policies.items() for alias in (name, *settings.aliases)]
    for name, settings in config.policies.items():
        if settings.sticky is not None and config.form_of(name) != "text":
            raise ConfigError(
                f'[policies.{name}] sticky = "session" is for free text; set form = "text", or leave it out'
            )
        if not 0 < settings.session_idle < float("inf"):
            raise ConfigError(f"[policies.{name}] session_idle must be above 0 seconds; got {settings.session_idle!r}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{min(twice)!r} names two policies; give each name and alias once")
