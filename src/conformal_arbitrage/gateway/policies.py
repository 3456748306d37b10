"""Policies in force: their versions, certificate files and models."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypedDict, TypeVar

from msgspec import structs

from conformal_arbitrage.calibration.certificate import Certificate, is_cascade
from conformal_arbitrage.calibration.options import NET, Feature, refusal, refuse_combination
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.errors import (
    ArbitrageError,
    CertificateError,
    ConfigError,
    LaterCertificateError,
    RequestError,
    ScorerError,
    StaleCalibrationError,
    StoreError,
)
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.review_queue import ReviewQueue, ReviewScorer
from conformal_arbitrage.live.binding import UNSIGNED, allowable, check_group_source
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Config, Form, PolicyConfig
from conformal_arbitrage.live.reviewers import ReviewTerms, review_terms
from conformal_arbitrage.live.rule import (
    Answered,
    CascadeChooser,
    CascadeRouter,
    CascadeRule,
    ConformalArbitrage,
    ConformalRouter,
    answered,
    scored,
)
from conformal_arbitrage.live.service import AgeLimits, CertificateGuard, LossFacts, deferring, voided, watchable
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.kinds import Section
from conformal_arbitrage.models.port import Answerer, Identity, Quota, Scorer, WrappedModel, fingerprint
from conformal_arbitrage.monitoring.lines import Lines, ledger_names
from conformal_arbitrage.store import policies
from conformal_arbitrage.store.ledger import LedgerKey
from conformal_arbitrage.store.policies import Exclusions, PolicyVersion
from conformal_arbitrage.store.record import AlarmBody, JSONObject
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, ChatRequest, Decision, Leg, Query, Spent, is_object

_log = logging.getLogger("conformal_arbitrage.gateway")
_Model = TypeVar("_Model", Scorer, Answerer)
ServingMode = Literal["enforce", "shadow", "safe"]
NOT_OURS = (StaleCalibrationError, LaterCertificateError)
"""Why a version in the store may be another gateway's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuPair:
    """The two models over menus; of a cascade, `models` has all before the Guardian. `review` is about people, if any.

    `fallback` is what is given if the Guardian fails, in every mode; None if that is an error.
    """

    primary: Scorer
    guardian: Scorer
    models: Mapping[str, Scorer] = field(default_factory=dict[str, Scorer])
    guardian_name: str = "guardian"
    review: ReviewTerms | None = None
    fallback: str | None = None
    form: ClassVar[Form] = "menu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """The two models in free text; for a cascade, and if the Guardian fails, as in `MenuPair`."""

    primary: Answerer
    guardian: Answerer
    models: Mapping[str, Answerer] = field(default_factory=dict[str, Answerer])
    guardian_name: str = "guardian"
    fallback: str | None = None
    review: ClassVar[None] = None
    form: ClassVar[Form] = "text"


ModelPair = MenuPair | TextPair
ServedRule = ConformalArbitrage | ConformalRouter | CascadeRule


class _BuiltModels(TypedDict, Generic[_Model]):
    """The models of a pair; of a cascade, `models` has all before the Guardian."""

    primary: _Model
    guardian: _Model | WrappedModel[_Model]
    models: dict[str, _Model]
    guardian_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPolicy:
    """What the monitor of a policy's version needs to know.

    Attributes:
        key: its ledger; of a certificate by groups, each ledger has this key with its own name.
        lines: what each ledger is watched against, by its name: "" without groups.
        facts: what losses depend on.
        by_people: whether the Guardian is a person, who may take days.
        ledgers: by group, the name of its ledger; None without groups. The queries of any other group are all deferred.
    """

    key: LedgerKey
    lines: Mapping[str, Lines]
    facts: LossFacts
    by_people: bool
    ledgers: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls, certificate: Certificate, key: LedgerKey, lines: Mapping[str, Lines], *, by_people: bool
    ) -> "WatchedPolicy":
        """Return what the monitor of a certificate needs to know."""
        ledgers = None if certificate.groups is None else ledger_names(certificate)
        return cls(key=key, lines=lines, facts=LossFacts.of(certificate), by_people=by_people, ledgers=ledgers)

    def key_of(self, group: str | None) -> LedgerKey | None:
        """Return the ledger of a query of a group; None if all of these are deferred, so that there is nothing to watch."""
        if self.ledgers is None:
            return self.key
        name = self.ledgers.get(group or "")
        return None if name is None else structs.replace(self.key, group=name)

    def keys(self) -> list[LedgerKey]:
        """Return all ledgers."""
        return [structs.replace(self.key, group=name) if name else self.key for name in self.lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """One version of a policy, ready to decide; without a certificate it can only run in shadow mode.

    Attributes:
        certificate: what was installed, whatever the mode.
        rule: what decides; in safe mode it defers everything.
        alpha: the certificate's risk budget; None without one.
        mode: as configured, or "safe" while an alarm stands.
        guarantee: what the certificate promises: on average over calibrations, or with high probability.
        forfeited: why no decision has a guarantee, whatever the request; None if nothing stands against one.
        lifts: how often alarms of this version were lifted.
        watched: what its monitor needs to know; None without a monitor.
        unwatched: why there is none.
        guarded: how many known losses the threshold in force rests on; None without a guard.
        installed: when, in seconds since 1970.
        expired: whether it has been in force for longer than max_age.
        excluded: the API keys that the promise does not cover.
    """

    name: str
    version: int
    settings: PolicyConfig
    pair: ModelPair
    certificate: Certificate | None
    rule: ServedRule | None
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
    excluded: frozenset[str] = frozenset()


class PolicyTable:
    """All policies in force.

    Args:
        pairs: the models, by policy.
        secret: the project's; certificates must be signed with it.
    """

    def __init__(self, config: Config, store: Store, pairs: Mapping[str, ModelPair], secret: ProjectSecret) -> None:
        self._config = config
        self._store = store
        self._pairs = pairs
        self._secret = secret
        self._live: dict[str, LivePolicy] = {}
        self._unusable: dict[str, ArbitrageError] = {}
        self._states: dict[str, tuple[int, int, int, bool]] = {}  # newest and own version, its lifts, whether alarmed
        self._excluded = dict.fromkeys(config.policies, Exclusions())
        self._own: dict[str, PolicyVersion] = {}
        self._others: dict[tuple[str, int], ArbitrageError] = {}  # why versions belong to other gateways
        self._aliases = {alias: name for name, p in config.policies.items() for alias in (*p.aliases, name)}
        self._seen = -1

    async def load(self, *, installing: bool = True) -> None:
        """Load the policies in force.

        Args:
            installing: whether to install the certificate files that changed since the last start; if not, each policy
                must have a version.

        Raises:
            ArbitrageError: one of them cannot be served.
        """
        if installing:
            await install_files(self._config, self._store, self.bind)
        else:
            await require_installed(self._config, self._store)
        for name, settings in self._config.policies.items():
            if settings.certificate is None:
                self._live[name] = self._without_certificate(name)
        await self.refresh(await self._store.change_count())
        for error in self._unusable.values():
            raise error
        for live in self._live.values():
            _check_allowed(live)
        for name, version in self._own.items():
            if self._live[name].version:
                _log.info("%s", note_of_start(self._config, version), extra={"policy": name})

    def _without_certificate(self, name: str) -> LivePolicy:
        settings = self._config.policies[name]
        if settings.mode != "shadow":
            raise ConfigError(f'[policies.{name}] needs a certificate, or mode = "shadow"')
        pair = self._pairs[name]
        return LivePolicy(
            name=name, version=0, settings=settings, pair=pair, certificate=None, rule=None,
            identities_sha256=fingerprint(identities_of_pair(pair, settings.group)), alpha=None, mode="shadow",
            unwatched="there is no certificate yet",
        )  # fmt: skip

    async def refresh(self, count: int) -> None:
        """Put in force what this gateway or another has installed.

        A version that cannot be used takes its policy out of service; the others stay in service. One that was made for
        other models, or by a later release, belongs to other gateways, which may serve beside this one while one replaces
        the other: the newest version of this gateway's own stays in force here.

        Args:
            count: the store's change count; an earlier one changes nothing.
        """
        if count <= self._seen:
            return
        for name, exclusions in (await self._store.run(policies.exclusions, self._config.policies)).items():
            if exclusions.number > self._excluded[name].number:
                self._excluded[name] = exclusions
                if name in self._live:
                    self._live[name] = excluding(self._live[name], exclusions.keys)
        for version in await self._store.run(policies.active):
            if version.name in self._config.policies:
                await self._take_up(version)
        self._seen = max(self._seen, count)  # a concurrent refresh may have seen more

    async def _take_up(self, newest: PolicyVersion) -> None:
        """Put the newest version in force, or the newest that belongs to this gateway, if there is one."""
        bound = self._bound(newest)
        if not isinstance(bound, NOT_OURS):
            self._put_in_force(newest, newest, bound)
            return
        for version in await self._store.run(policies.history, newest.name):
            earlier = self._bound(version) if version.version < newest.version else bound
            if not isinstance(earlier, NOT_OURS):
                self._put_in_force(newest, version, earlier)
                return
        live = self._live.get(newest.name)
        self._put_in_force(newest, newest, bound if live is None or live.version else live)  # or goes on without any

    def _bound(self, version: PolicyVersion) -> "LivePolicy | ArbitrageError":
        """Bind a version, or return why it cannot be bound; one that belongs to other gateways stays theirs."""
        place = version.name, version.version
        if place in self._others:
            return self._others[place]
        try:
            check_intact(version)
            return self.bind(version.name, version.certificate, version)
        except NOT_OURS as error:
            self._others[place] = error
            return error
        except ArbitrageError as error:
            return error

    def _put_in_force(
        self, newest: PolicyVersion, current: PolicyVersion, bound: "LivePolicy | ArbitrageError"
    ) -> None:
        """Put a version in force as it stands, unless a later state of the policy has been seen, usable or not."""
        name, state = newest.name, (newest.version, current.version, current.lifts, current.alarm is not None)
        before = self._states.get(name, (0, 0, 0, False))
        if state <= before:
            return
        self._states[name] = state
        if newest is not current:
            message = "version %d was made for other models or by a later release; version %d stays in force here"
            _log.warning(message, newest.version, current.version, extra={"policy": name})
        if state[1:] == before[1:] and name in self._live:
            return  # only the newest changed, and a guard or an expiry may have changed the policy in force since
        self._live.pop(name, None)
        self._unusable.pop(name, None)
        self._own[name] = current
        if isinstance(bound, ArbitrageError):
            self._unusable[name] = bound
            _log.error("out of service: %s", bound, extra={"policy": name})
        else:
            self._live[name] = excluding(bound, self._excluded[name].keys)

    def behind(self) -> dict[str, int]:
        """Return the newest version of each policy in force that belongs to other gateways than this one."""
        newest = {name: state[0] for name, state in self._states.items() if name in self._live}
        return {name: number for name, number in newest.items() if number > self._live[name].version}

    def bind(self, name: str, document: JSONObject, version: PolicyVersion | None = None) -> LivePolicy:
        """Bind a certificate to the models of a policy; its guarantee, its key and its identities are checked.

        Args:
            version: which is to be put in force; None to check only.

        Raises:
            CertificateError: it cannot be used with them.
            OptionError: the policy's alarm_line has no proof for it.
        """
        settings, pair = self._config.policies[name], self._pairs[name]
        cascade = settings.cascade or is_cascade(document)
        if cascade:
            check_cascade_policy(name, settings, document)
        bound = Certificate.from_dict(dict(document), source=f"policy {name}")
        check_group_source(bound, settings.group, policy=name)
        given_up = None if bound.ancestry is None else bound.ancestry.no_guarantee
        forfeited = self._check_signature(name, bound) or given_up or voided(version)
        bound = self._with_key(name, bound)
        if bound.learned is not None:
            bound.learned_score().rules()  # fitted now, not with the first request
        safe = version is not None and version.alarm is not None and settings.mode == "enforce" and not cascade
        rule = self._rule(settings, deferring(bound) if safe else bound, pair, forfeited)
        live = LivePolicy(
            name=name,
            version=0 if version is None else version.version,
            settings=settings,
            pair=pair,
            certificate=None if cascade else bound,
            rule=rule,
            identities_sha256=fingerprint(identities_of_pair(pair, settings.group)),
            alpha=bound.alpha,
            mode="safe" if safe else settings.mode,
            guarantee="crc" if bound.confidence is None else "high_probability",
            forfeited=rule.no_guarantee,
            lifts=0 if version is None else version.lifts,
            installed=0.0 if version is None else version.installed,
            alarm=None if version is None else version.alarm,
            unwatched=refusal("monitor", "path") if cascade else "in shadow mode the Guardian decides",
        )
        if cascade or settings.mode == "shadow":
            return live
        live = _watched(live, bound)
        return replace(live, guarded=0) if is_guarded(live, bound) else live

    def swap(self, old: LivePolicy, new: LivePolicy) -> None:
        """Put a policy in force in the place of another from the next request on, unless that was replaced meanwhile."""
        if self._live.get(old.name) is old:
            self._live[old.name] = new

    def _check_signature(self, name: str, certificate: Certificate) -> str | None:
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
        """Return a certificate with the key behind its draws, a subkey of the secret."""
        keyed = certificate.with_key_of(self._secret)
        if keyed.provenance.key_sha256 is not None and keyed.key is None:
            raise CertificateError(f"policy {name}: this gateway does not hold the key behind the certificate's draws")
        return keyed

    def _rule(
        self, settings: PolicyConfig, certificate: Certificate, pair: ModelPair, forfeited: str | None
    ) -> ServedRule:
        allow, source = settings.allow, settings.group
        if isinstance(pair, MenuPair):
            if certificate.is_cascade:
                return CascadeChooser(
                    models=pair.models, guardian=pair.guardian, guardian_name=pair.guardian_name, certificate=certificate,
                    fallback=pair.fallback, allow=allow, forfeited=forfeited,
                )  # fmt: skip
            return ConformalArbitrage(
                primary=pair.primary, guardian=pair.guardian, certificate=certificate, safe_action=pair.fallback,
                allow=allow, forfeited=forfeited, group_source=source,
            )  # fmt: skip
        if certificate.is_cascade:
            return CascadeRouter(
                models=pair.models, guardian=pair.guardian, guardian_name=pair.guardian_name, certificate=certificate,
                fallback=pair.fallback, allow=allow, forfeited=forfeited,
            )  # fmt: skip
        return ConformalRouter(
            primary=pair.primary, guardian=pair.guardian, certificate=certificate, safe_answer=pair.fallback,
            allow=allow, forfeited=forfeited, group_source=source,
            session_idle=None if settings.sticky is None else settings.session_idle,
        )  # fmt: skip

    def named(self, model: str, caller: Caller | None = None) -> LivePolicy:
        """Return the policy that a request's model names.

        Raises:
            RequestError: the caller's key is not good for it, there is none, or it is out of service.
        """
        name = self._aliases.get(model, "")
        if caller is not None and caller.policies is not None:
            caller.check_policy(name, model)
        live = self._live.get(name)
        if name in self._unusable:
            raise RequestError(
                f"policy {name} is out of service: its certificate was made for other models, is not signed with this "
                "gateway's secret, or was changed in the store",
                status=503, code="policy_unusable", param="model",
            )  # fmt: skip
        if live is None:
            known = ", ".join(live.name for live in self.all(caller))
            raise RequestError(
                f"there is no policy {model!r:.80}; there are {known}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return live

    def is_configured(self, name: str) -> bool:
        """Return whether the configuration has a policy, in service or not."""
        return name in self._config.policies

    def exposes_all(self, name: str) -> bool:
        """Return whether callers may see the relaxation and margins of a policy."""
        settings = self._config.policies.get(name)
        return settings is not None and settings.expose == "full"

    def lets_callers_grade(self, name: str) -> bool:
        """Return whether callers may grade both answers to their own requests."""
        settings = self._config.policies.get(name)
        return settings is not None and settings.callers_grade

    def all(self, caller: Caller | None = None) -> list[LivePolicy]:
        """Return every policy in force that a caller's key is good for."""
        return [live for name, live in self._live.items() if caller is None or caller.sees(name)]

    def out_of_service(self, caller: Caller | None = None) -> dict[str, ArbitrageError]:
        """Return why policies that a caller's key is good for are out of service, by name."""
        return {name: error for name, error in self._unusable.items() if caller is None or caller.sees(name)}

    async def install(self, name: str, certificate: JSONObject, *, by: str, dry_run: bool) -> PolicyVersion | None:
        """Install a certificate after checking it against the models; return None after a dry run."""
        self._known(name)
        self._check(name, certificate)
        if dry_run:
            return None
        version = await self._store.run(policies.install, name, certificate, by=by)
        if version is not None:
            await self._take_up(version)
        return version

    async def forfeits(self, name: str, certificate: JSONObject) -> str | None:
        """Return why decisions would have no guarantee if a certificate were installed now; None if they would have one."""
        live = self.bind(name, certificate, await self._store.run(policies.prospect, name, certificate))
        return excluding(live, self._excluded[name].keys).forfeited

    async def rollback(self, name: str, *, by: str) -> PolicyVersion:
        """Go back to the version before the active one, if it fits the models."""
        self._known(name)
        history = {version.version: version for version in await self._store.run(policies.history, name)}
        earlier = history.get(history[max(history)].origin - 1) if history else None
        if earlier is not None:
            self._check(name, earlier.certificate)
            self._check_history(earlier)
        version = await self._store.run(policies.rollback, name, by=by)
        if version is None:
            raise RequestError(f"policy {name} has no earlier version", status=409, code="nothing_to_roll_back")
        await self._take_up(version)
        return version

    def _check(self, name: str, certificate: JSONObject) -> None:
        try:
            self.bind(name, certificate)
        except ArbitrageError as error:
            raise RequestError(str(error), status=422, code="certificate_refused") from error

    def _check_history(self, version: PolicyVersion) -> None:
        try:
            check_intact(version)
        except CertificateError as error:
            raise RequestError(str(error), status=422, code="certificate_refused") from error

    def _known(self, name: str) -> None:
        if not self.is_configured(name):
            raise RequestError(f"there is no policy {name!r:.80}", status=404, code="model_not_found")


_GAINS_EXCLUDED = "gains of the excluded keys may be what kept the net loss, so there is no proof for it without them"


def excluding(live: LivePolicy, keys: frozenset[str]) -> LivePolicy:
    """Return a policy whose promise does not cover some API keys; if gains count, that leaves it without one."""
    live = replace(live, excluded=keys)
    if live.rule is None or live.rule.certificate.loss.name != NET:
        return live
    others = None if live.forfeited == _GAINS_EXCLUDED else live.forfeited
    rule = replace(live.rule, forfeited=others or (_GAINS_EXCLUDED if keys else None))
    return replace(live, rule=rule, forfeited=rule.no_guarantee)


def _watched(live: LivePolicy, certificate: Certificate) -> LivePolicy:
    """Return a policy with what its monitor needs to know, or with why it has none."""
    lines, reason = watchable(certificate, live.settings.alarm_line)
    reason = live.settings.ungradable(live.pair.form) or reason
    if lines is None or reason is not None:
        return replace(live, unwatched=reason)
    key = LedgerKey(policy=live.name, version=live.version, lifts=live.lifts, identities_sha256=live.identities_sha256)
    by_people = live.pair.guardian.identity.get("kind") == "human"
    return replace(live, watched=WatchedPolicy.of(certificate, key, lines, by_people=by_people), unwatched=None)


# --- Parts of a policy ---


def _check_allowed(live: LivePolicy) -> None:
    """Refuse to allow a difference that there cannot be, so that nobody relies on a typo."""
    now = identities_of_pair(live.pair, live.settings.group)
    known = allowable({} if live.rule is None else live.rule.certificate.identities, now)
    for name in live.settings.allow:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ConfigError(
                f"[policies.{live.name}] allow names {name!r:.60}, which neither the certificate nor the models have; "
                f"{remedy}"
            )


def identities_of_pair(pair: ModelPair, group: str | None = None) -> dict[str, Identity]:
    """Return the identities of both models by role, or of all models of a cascade by name.

    Args:
        group: where requests name their group, if they do: groups of another source are other groups.
    """
    if pair.models:
        return {
            **{name: dict(model.identity) for name, model in pair.models.items()},
            pair.guardian_name: dict(pair.guardian.identity),
        }
    models: dict[str, Identity] = {"primary": dict(pair.primary.identity), "guardian": dict(pair.guardian.identity)}
    return models if group is None else {**models, "group": {"source": group}}


def remedy_of(pair: ModelPair) -> str:
    """Return what to do about a question that the Guardian did not answer, and for which there was no safe action either."""
    if pair.fallback is None:
        return f"set {'safe_action' if pair.form == 'menu' else 'safe_answer'} in [task] to continue without it"
    return f"the safe action {pair.fallback!r} is not one of the actions of this question"


def is_guarded(live: "LivePolicy", certificate: Certificate) -> bool:
    """Return whether a guard watches over a policy.

    Raises:
        CertificateError, OptionError: one is configured, and there is no proof or no quantiles for it.
    """
    if not live.settings.guard or live.settings.mode != "enforce" or certificate.status == "always_defer":
        return False
    if live.watched is None:
        raise CertificateError(f"policy {live.name}: guard = true needs a monitor; {live.unwatched}")
    CertificateGuard(certificate)
    return True


def guarded_policy(live: "LivePolicy", guard: CertificateGuard) -> "LivePolicy":
    """Return a policy with the threshold that its guard puts in force."""
    known = guard.standing().known
    if live.rule is None or isinstance(live.rule, CascadeRouter | CascadeChooser):
        return live  # a cascade has no guard
    if live.mode != "enforce" or known == live.guarded:
        return live
    now, certificate = live.rule.certificate, guard.in_force()
    same = (now.relaxation, now.boundary_u) == (certificate.relaxation, certificate.boundary_u)
    return replace(live, rule=live.rule if same else replace(live.rule, certificate=certificate), guarded=known)


def distrusted_policy(live: "LivePolicy", reason: str) -> "LivePolicy":
    """Return a policy without its guarantee, since its evidence is not what was written."""
    if live.rule is None or live.forfeited is not None:
        return live
    return replace(live, rule=replace(live.rule, forfeited=reason), forfeited=reason)


def age_limits(settings: PolicyConfig) -> AgeLimits:
    """Return what a policy says of the age of its certificate."""
    return AgeLimits(max_age=settings.max_age, max_decisions=settings.max_decisions, fresh_days=settings.fresh_days)


def expired_policy(live: "LivePolicy", now: float, decisions: int | None) -> "LivePolicy":
    """Return a policy without its guarantee if its certificate has expired, and in shadow mode if so set.

    Args:
        decisions: how many there were under its certificate, if they are counted.
    """
    reason = age_limits(live.settings).expiry((now - live.installed) / DAY, decisions)
    if reason is None or live.expired or live.rule is None:
        return live
    forfeited = live.forfeited or reason
    stops = live.settings.at_expiry == "shadow" and live.mode == "enforce"
    return replace(
        live,
        rule=replace(live.rule, forfeited=forfeited),
        forfeited=forfeited,
        mode="shadow" if stops else live.mode,
        expired=True,
    )


# --- Cascades ---


def cascade_features(settings: PolicyConfig) -> list[Feature]:
    """Return what a policy asks for that may have no proof for a cascade."""
    wanted: dict[Feature, bool] = {"red line": settings.alarm_line == "alpha", "guard": settings.guard}
    return [feature for feature, is_set in wanted.items() if is_set]


def check_cascade_policy(name: str, settings: PolicyConfig, document: JSONObject) -> None:
    """Check that a policy and its certificate are both for a cascade, and that the policy asks for nothing without a proof.

    Raises:
        OptionError: it does.
        StaleCalibrationError: the policy is served by a pair, or the certificate is for one.
    """
    for feature in cascade_features(settings):
        refuse_combination(feature, "path")
    if not is_cascade(document):
        raise StaleCalibrationError(
            f"policy {name}: the certificate is for two models, and the policy is served by a cascade; calibrate with "
            f"--path, or drop cascade in [policies.{name}]"
        )
    if not settings.cascade:
        raise StaleCalibrationError(
            f"policy {name}: the certificate is for a cascade of several models; set cascade = true in [policies.{name}]"
        )


async def all_scored(models: Mapping[str, Scorer], query: Query) -> list[Leg]:
    """Ask every cheap model of a cascade, at once."""
    return await asyncio.gather(*(scored("primary", model, query) for model in models.values()))


async def all_answered(models: Mapping[str, Answerer], request: ChatRequest) -> list[Answered]:
    """Let every cheap model of a cascade answer, at once."""
    return await asyncio.gather(*(answered("primary", model, request) for model in models.values()))


def chain_answers(decision: Decision) -> tuple[str, ...] | None:
    """Return what each cheap model said, empty where it failed; None unless several were asked."""
    replies = [leg.reply for leg in decision.legs if leg.role == "primary"]
    return tuple(map(_said, replies)) if len(replies) > 1 else None


def _said(reply: object) -> str:
    try:
        return answer_text(reply["choices"][0]["message"]) if is_object(reply) else ""
    except ScorerError:
        return ""


# --- The certificate files that a configuration names ---


async def install_files(
    config: Config, store: Store, check: Callable[[str, JSONObject], object]
) -> list[PolicyVersion]:
    """Install each certificate file that changed since the last start; return what was installed.

    Args:
        check: raises for a certificate that a policy of this configuration cannot be served with.
    """
    named = [(name, settings.certificate) for name, settings in config.policies.items() if settings.certificate]
    versions = [await _install_file(store, name, Path(config.folder) / file, check) for name, file in named]
    return [version for version in versions if version is not None]


async def _install_file(
    store: Store, name: str, path: Path, check: Callable[[str, JSONObject], object]
) -> PolicyVersion | None:
    """Install a certificate file that differs from the one that the last start found.

    One that is the same has been installed, and what was installed after it stays in force. A store without a note of
    the last start takes a file that it has never had.
    """
    document = Certificate.load(path).to_dict(with_arrays=True)
    sha256 = fingerprint(document)
    last = await store.run(policies.configured, name)
    history = await store.run(policies.history, name)
    known = any(version.certificate == document for version in history)
    changed = sha256 != last and (last is not None or not known)
    active = bool(history) and history[0].intact and history[0].certificate == document
    version = None
    if not history or (changed and not active):
        check(name, document)
        newest = history[0].version if history else 0
        version = await store.run(policies.install, name, document, by="configuration", after=newest)
        if version is None:  # another gateway was first, most likely with the same file
            return await _install_file(store, name, path, check)
    if sha256 != last:
        await store.run(policies.note_configured, name, sha256)
    return version


async def require_installed(config: Config, store: Store) -> None:
    """Check that every policy with a certificate file has a version, where a start installs none."""
    installed = {version.name for version in await store.run(policies.active)}
    for name, settings in config.policies.items():
        if settings.certificate and name not in installed:
            raise StoreError(
                f"policy {name} has no version in the store, and with --no-migrate none is installed; run `arbitrage "
                "records migrate` with this configuration first"
            )


def note_of_start(config: Config, version: PolicyVersion) -> str:
    """Return which version a start puts in force, and why not the certificate file if it is another."""
    file = config.policies[version.name].certificate
    named = f"version {version.version} is in force"
    if file is None:
        return f"{named}, installed by {version.installed_by}"
    if Certificate.load(Path(config.folder) / file).to_dict(with_arrays=True) == version.certificate:
        return f"{named}, the certificate file {file}"
    return (
        f"{named}, installed by {version.installed_by}; the certificate file {file} is not, since it is unchanged since "
        "the last start"
    )


def check_intact(version: PolicyVersion) -> None:
    """Refuse a version that is not what was installed."""
    if not version.intact:
        raise CertificateError(
            f"policy {version.name}, version {version.version}: it is not what was installed last; run `arbitrage records "
            "verify`, then restore a backup, or put another certificate file in place and start again"
        )


# --- From a configuration's models to the pair behind each policy ---


def pairs_of(models: Models, quota: Quota | None = None, queue: ReviewQueue | None = None) -> dict[str, ModelPair]:
    """Return the two models of every policy; policies with the same models in the same form share them.

    Args:
        quota: limits how often Guardians are asked, if given; people limit themselves.
        queue: where people are asked who are a Guardian; None if only identities are wanted.

    Raises:
        ConfigError: a model cannot be used, or its cost cannot be limited as configured.
    """
    config = models.config
    shared: dict[tuple[str, str, Form], ModelPair] = {}
    pairs: dict[str, ModelPair] = {}
    for name in config.policies:
        terms = review_terms(config, name)
        if terms is not None:
            pairs[name] = _people(models, name, terms, queue)
            continue
        if config.policies[name].cascade:
            pairs[name] = _pair(models, config.form_of(name), None, quota)
            continue
        sections = config.section_of(name, "primary"), config.section_of(name, "guardian")
        key = (*sections, config.form_of(name))
        if key not in shared:
            shared[key] = _pair(models, config.form_of(name), sections, quota)
        pairs[name] = shared[key]
    return pairs


def _people(models: Models, policy: str, terms: ReviewTerms, queue: ReviewQueue | None) -> MenuPair:
    """Return a model and the people behind it."""
    if models.config.policies[policy].cascade:
        raise ConfigError(
            f"[policies.{policy}] people answer as the Guardian of one Primary, not of a cascade; drop cascade = true"
        )
    guardian = ReviewScorer(terms, None) if queue is None else queue.serve(policy, terms)
    primary = models.scorer("primary", models.config.section_of(policy, "primary"))
    return MenuPair(primary=primary, guardian=guardian, review=terms, fallback=models.config.task.safe_action)


def _pair(models: Models, form: Form, sections: tuple[str, str] | None, quota: Quota | None) -> ModelPair:
    """Return the models of two sections; without any, those of the cascade, each policy's own."""
    task = models.config.task
    if form == "menu":
        return MenuPair(**_built(models, models.scorer, sections, quota), fallback=task.safe_action)
    return TextPair(**_built(models, models.answerer, sections, quota), fallback=task.safe_answer)


def _built(
    models: Models, build: Callable[[Section, str], _Model], sections: tuple[str, str] | None, quota: Quota | None
) -> _BuiltModels[_Model]:
    if sections is None:
        cheap, name, guardian = models.cascade(build)
        primary = next(iter(cheap.values()))
    else:
        primary, cheap, name, guardian = build("primary", sections[0]), {}, "guardian", build("guardian", sections[1])
    return {"primary": primary, "models": cheap, "guardian_name": name, "guardian": _limited(guardian, quota)}


def _limited(model: _Model, quota: Quota | None) -> _Model | WrappedModel[_Model]:
    return model if quota is None else WrappedModel(model, quota=quota)


def check_spending(config: Config, models: Models) -> None:
    """Check that the largest cost of every Guardian call is known, once all pairs are built."""
    if config.gateway.guardian_cost_per_hour is None:
        return
    for policy in config.policies:
        section = config.section_of(policy, "guardian")
        model = config.section(section)
        if section not in models.capped:
            raise ConfigError(
                f"guardian_cost_per_hour cannot limit [{section}]: kind '{model.kind}' makes no calls that could be priced; "
                "remove the limit, or use guardian_calls_per_minute"
            )
        pricing = model.pricing()
        by_length = pricing is None or pricing.cost(Spent(calls=1, input_tokens=1, output_tokens=None)) is None
        if by_length and not model.limits_replies(config.form_of(policy)):
            raise ConfigError(
                "guardian_cost_per_hour needs a limit on the length of replies in free text; set max_tokens in "
                f"[{section}]"
            )


def check_policies(config: Config) -> None:
    """Check that a configuration has policies, that no name or alias stands for two, and that each can do what it says.

    Raises:
        ConfigError: it has none, or a name does, or a policy of menus is to decide by session, or nobody can grade audits.
    """
    if not config.policies:
        raise ConfigError("the configuration has no policy; add a section [policies.NAME] with a certificate")
    names = [alias for name, settings in config.policies.items() for alias in (name, *settings.aliases)]
    for name, settings in config.policies.items():
        for alias in settings.aliases:
            if not alias.strip() or not alias.isprintable():
                raise ConfigError(f"[policies.{name}] aliases has {alias!r:.60}, which no request can name; remove it")
        if settings.sticky is not None and config.form_of(name) != "text":
            raise ConfigError(
                f'[policies.{name}] sticky = "session" is for free text; set form = "text", or leave it out'
            )
        ungradable = settings.ungradable(config.form_of(name))
        if settings.mode == "enforce" and ungradable is not None:
            raise ConfigError(f"[policies.{name}] {ungradable}")
        if not 0 < settings.session_idle < float("inf"):
            raise ConfigError(f"[policies.{name}] session_idle must be above 0 seconds; got {settings.session_idle!r}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{min(twice)!r} names two policies; give each name and alias once")
