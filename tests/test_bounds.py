"""Every sentence that states a bound, in docs/ or in a certificate, is covered by a test that docs/bounds.md names."""

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from conformal_arbitrage.calibration.learned import LearnedTerms
from conformal_arbitrage.calibration.options import DialStop, GroupThreshold
from conformal_arbitrage.calibration.promises import (
    Ancestry,
    Average,
    ByGroup,
    CalibratedThreshold,
    ChainTuning,
    Cluster,
    Confident,
    Dial,
    Evidence,
    Learned,
    ModelChain,
    Net,
    Own,
    PerSession,
    Regret,
    Step,
    Threshold,
)
from conformal_arbitrage.calibration.promises import (
    Path as PathRule,
)
from conformal_arbitrage.calibration.sentences import guarantee, summary

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not page.name.startswith(("benchmarks", "paper", "architecture"))
]
TABLES = (ROOT / "docs" / "bounds.md").read_text()
WORDS = dict(re.findall(r"^\| (.+?) \| `(test_\w+)` \|$", TABLES, re.MULTILINE))
TESTS = set(re.findall(r"^\| .+ \| `tests/\S+\.py::(\w+)` \|$", TABLES, re.MULTILINE))
STATES_A_BOUND = re.compile(
    r"\b(expected|long-run|realised|average|mean)\b[^.]*\b(at most|above|below|exceed)|\bbounds the\b"
    r"|\b(the|total) loss is then\b|declared to be"
    r"|\bkeeps? (the|its|your|a|that) (risk )?(budget|quota|bound)"
    r"|\b(budget|quota) (is|holds)\b[^.]*\bkept|worse than|deferr\w+ [^.]*costs nothing"
    r"|confidence interval|guarantee (still )?holds",
    re.IGNORECASE,
)
NO_PROMISES = (
    "no relaxation keeps",
    "no threshold that keeps",
    "breaks the guarantee",
    "who keeps the budget",
    "which decision rule",
    "asterisk",
    "c3po-like",
)


def sentences(text):
    """Yield the sentences of a page that state a bound, without code and without the tables of covered words."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\| .+ \| `test\S+` \|$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^> ?", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#])", text):
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z`*])", " ".join(paragraph.split())):
            if STATES_A_BOUND.search(sentence) and not any(words in sentence.lower() for words in NO_PROMISES):
                yield sentence


EVIDENCE = {"n": 200, "log_sha256": "", "empirical_risk": 0.05, "slack": 0.0}
CLUSTER = Cluster(alpha=0.1, cluster="talk", clusters=20, max_cluster_size=10)


def certificates():
    """Yield the text of certificates with every combination of options that changes its words."""
    for relaxation, name, binarized, router, sees, boundary, missing, promise in itertools.product(
        (0.25, None), ("guardian_regret", "net", "mine"), (False, True), (False, True),
        ("all", "candidates", "all-restricted-loss"), ("include", "random"), (None, "worst_case"),
        (Average(alpha=0.1), CLUSTER, PerSession(alpha=0.1)),
    ):  # fmt: skip
        rule = Threshold(relaxation=relaxation, boundary_u=None, guardian_sees=sees, boundary=boundary)
        common = {"bound": 1.0, "binarized": binarized, "missing_guardian": missing}
        loss = {
            "guardian_regret": Regret(**common),
            "net": Net(**common, regret=0.02),
            "mine": Own(**common, name="mine", full_sight_loss=0.05),
        }[name]
        evidence = Evidence(**EVIDENCE, router=router, spread=0.01 if name == "net" else None)
        if router or not isinstance(promise, PerSession):
            yield guarantee(rule, promise, loss, evidence)
            if not isinstance(promise, Cluster):
                yield summary(rule, promise, loss, evidence)


def confident_certificates():
    """Yield the text of certificates with a confidence, a dial or groups."""
    stops = (DialStop(alpha=0.1, relaxation=0.2, boundary_u=None, empirical_risk=0.05),)
    groups = {"a": GroupThreshold(n=100, relaxation=0.2, boundary_u=None, empirical_risk=0.05)}
    shown = {"guardian_sees": "all", "boundary": "include"}
    threshold, grouped = (
        Threshold(relaxation=0.2, boundary_u=None, **shown),
        ByGroup(by="group", groups=groups, **shown),
    )
    merged = ByGroup(by="group", groups=groups, small_groups="merge", **shown)
    average, confident = Average(alpha=0.1), Confident(alpha=0.1, confidence=0.95)
    dial = Dial(alpha=0.1, confidence=0.95, stops=stops)
    for rule, promise in (
        (threshold, confident), (threshold, dial), (grouped, average), (grouped, confident), (merged, average),
    ):  # fmt: skip
        yield guarantee(rule, promise, Regret(bound=1.0), Evidence(**EVIDENCE))
        yield summary(rule, promise, Regret(bound=1.0), Evidence(**EVIDENCE))


def chains():
    """Yield the text of certificates in a chain."""
    thresholds, shown = (
        CalibratedThreshold(relaxation=0.1, boundary_u=None),
        {"guardian_sees": "all", "boundary": "include"},
    )
    rules = (Threshold(relaxation=0.2, boundary_u=None, **shown), ByGroup(by="group", groups={}, **shown))
    promises = (Average(alpha=0.1), Confident(alpha=0.1, confidence=0.95))
    for step, promise, rule, collected in itertools.product(get_args(Step), promises, rules, (0, 100)):
        ancestry = Ancestry(
            step=step, renewal=1, first=200, since=0.0, collected=collected, root_sha256="", predecessor_sha256="",
            calibrated=thresholds if step == "tightened" else None,
        )  # fmt: skip
        yield guarantee(rule, promise, Regret(bound=1.0), Evidence(**EVIDENCE), ancestry)


def cascade_certificates():
    """Yield the text of certificates of cascades."""
    tuning = ChainTuning(rows=100, share=0.4, seed=0, ids_sha256="")
    for position, net, rounded, missing in itertools.product(
        (1, None), (False, True), (False, True), (None, "worst_case")
    ):
        rule = PathRule(
            chain=ModelChain(models=("a", "b"), answers=(), steps=()), models=("a", "b"), guardian="c",
            position=position, u=position,
            rounded=rounded, tuning=tuning, cost=1.0, guardian_cost=2.0, guardian_share=0.5,
        )  # fmt: skip
        common = {"bound": 1.0, "missing_guardian": missing}
        loss = Net(**common, regret=0.02) if net else Regret(**common)
        evidence = Evidence(n=200, log_sha256="", empirical_risk=0.05, spread=0.01)
        yield guarantee(rule, Average(alpha=0.1), loss, evidence)
        yield summary(rule, Average(alpha=0.1), loss, evidence)


def learned_certificates():
    """Yield the text of certificates with a learned score."""
    terms = LearnedTerms(
        features=("margin", "position", "menu", "group", "tokens"), version=1, menu_size=4, group_source=None,
        penalties=(1.0, 5.0), rows=190, columns=60, rounded_rows=3, missing={"group": 0, "tokens": 0}, deferred=0.4,
        sha256="",
    )  # fmt: skip
    for score, router, missing in itertools.product(("auto", "learned"), (False, True), (None, "worst_case")):
        rule, loss = Learned(score=score, terms=terms), Regret(bound=1.0, missing_guardian=missing)
        evidence = Evidence(**EVIDENCE, router=router)
        yield guarantee(rule, Average(alpha=0.1), loss, evidence)
        yield summary(rule, Average(alpha=0.1), loss, evidence)


def uncovered(text):
    return [sentence for sentence in sentences(text) if not any(words in sentence for words in WORDS)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_sentence_of_a_page_that_states_a_bound_is_covered(page):
    assert uncovered(page.read_text()) == [], "add its words and its test to the table in docs/bounds.md"


def test_every_sentence_of_a_certificate_that_states_a_bound_is_covered():
    texts = [*certificates(), *confident_certificates(), *chains(), *cascade_certificates(), *learned_certificates()]
    assert {sentence for text in texts for sentence in uncovered(text)} == set()


def test_every_word_of_the_table_is_said_somewhere_and_covered_by_a_listed_test():
    pages = [page.read_text() for page in PAGES]
    special = [*confident_certificates(), *chains(), *cascade_certificates(), *learned_certificates()]
    lines = [*set(certificates()), *special, *pages]
    lines = [sentence for text in lines for sentence in sentences(text)]
    assert len(WORDS) > 15
    for words, test in WORDS.items():
        assert any(words in sentence for sentence in lines), words
        assert test in TESTS, test


def test_a_bound_that_nobody_tests_is_caught():
    assert uncovered("The long-run loss is always below alpha. It keeps the budget for every subgroup.") != []
