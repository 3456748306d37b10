"""Every sentence that states a bound, in docs/ or in a certificate, is covered by a test that docs/guarantee.md names."""

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from conformal_arbitrage.calibration.certificate import Ancestry, CalibratedThreshold, Step, chain_words
from conformal_arbitrage.calibration.learned import LearnedTerms
from conformal_arbitrage.calibration.options import DialStop, GroupThreshold
from conformal_arbitrage.calibration.words import (
    guarantee_text,
    path_guarantee_text,
    path_summary,
    summary_lines,
    sure_promise,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not page.name.startswith(("benchmarks", "paper", "architecture"))
]
GUARANTEE = (ROOT / "docs" / "guarantee.md").read_text()
WORDS = dict(re.findall(r"^\| (.+?) \| `(test_\w+)` \|$", GUARANTEE, re.MULTILINE))
TESTS = set(re.findall(r"^\| .+ \| `tests/\S+\.py::(\w+)` \|$", GUARANTEE, re.MULTILINE))
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


def certificates():
    """Yield the text of certificates with every combination of options that changes its words."""
    for status, loss, binarized, router, sees, boundary, missing, clusters in itertools.product(
        ("ok", "always_defer"), ("guardian_regret", "net", "mine"), (False, True), (False, True),
        ("all", "candidates", "all-restricted-loss"), ("include", "random"), (None, "worst_case"), (None, 20),
    ):  # fmt: skip
        relaxation = 0.25 if status == "ok" else None
        yield guarantee_text(
            status=status, alpha=0.1, relaxation=relaxation, loss_bound=1.0, full_sight_loss=0.05 * (loss == "mine"),
            n=200, loss=loss, binarized=binarized, router=router, guardian_sees=sees, boundary=boundary,
            missing_guardian=missing, score_digits=12, clusters=clusters, max_cluster_size=clusters and 10,
            regret=0.02 if loss == "net" else None, spread=0.01 if loss == "net" else None,
        )  # fmt: skip
        if router and loss == "guardian_regret" and clusters is None:
            yield guarantee_text(
                status=status, alpha=0.1, relaxation=relaxation, loss_bound=1.0, full_sight_loss=0.0, n=200, loss=loss,
                binarized=binarized, router=True, guardian_sees=sees, boundary=boundary, missing_guardian=missing,
                score_digits=12, unit="session",
            )  # fmt: skip
        for unit in (None, "session") if router else (None,):
            yield summary_lines(alpha=0.1, n=200, router=router, relaxation=relaxation, guardian_sees=sees, unit=unit)


def sure_certificates():
    """Yield the sentences of certificates with a confidence, a dial or groups."""
    stops = (DialStop(alpha=0.1, relaxation=0.2, boundary_u=None, empirical_risk=0.05),)
    groups = {"a": GroupThreshold(n=100, relaxation=0.2, boundary_u=None, empirical_risk=0.05)}
    for confidence, dial, by in ((0.95, None, None), (0.95, stops, None), (None, None, "group"), (0.95, None, "group")):
        own = groups if by else None
        yield sure_promise(0.1, 200, confidence=confidence, dial=dial, by=by, groups=own)
        if by and confidence is None:
            yield sure_promise(0.1, 200, confidence=None, dial=None, by=by, groups=own, fewest=9)
        yield summary_lines(
            alpha=0.1, n=200, router=False, relaxation=0.2, guardian_sees="all", confidence=confidence, by=by
        )


def chains():
    """Yield what a chain of certificates adds to the guarantee of one."""
    thresholds = CalibratedThreshold(relaxation=0.1, boundary_u=None)
    for step, confidence, by, collected in itertools.product(get_args(Step), (None, 0.95), (None, "group"), (0, 100)):
        ancestry = Ancestry(
            step=step, renewal=1, first=200, since=0.0, collected=collected, root_sha256="", predecessor_sha256="",
            calibrated=thresholds if step == "tightened" else None,
        )  # fmt: skip
        yield chain_words("", ancestry, alpha=0.1, confidence=confidence, relaxation=0.2, by=by)


def cascade_certificates():
    """Yield the sentences of certificates of cascades."""
    for status, loss, rounded, missing in itertools.product(
        ("ok", "always_defer"), ("guardian_regret", "net"), (False, True), (None, "worst_case")
    ):
        regret = 0.02 if loss == "net" else None
        yield path_guarantee_text(
            status=status, models=("a", "b"), guardian="c", alpha=0.1, n=200, tuning_rows=100, loss=loss, rounded=rounded,
            missing_guardian=missing, spread=0.01, regret=regret,
        )  # fmt: skip
        yield path_summary(("a", "b"), "c", 0.1, 200, loss, status=status)


def learned_certificates():
    """Yield the text of certificates with a learned score."""
    terms = LearnedTerms(
        features=("margin", "position", "menu", "group", "tokens"), version=1, menu_size=4, group_source=None,
        penalties=(1.0, 5.0), rows=190, columns=60, rounded_rows=3, missing={"group": 0, "tokens": 0}, deferred=0.4,
        sha256="",
    )  # fmt: skip
    for score, router, missing in itertools.product(("auto", "learned"), (False, True), (None, "worst_case")):
        yield guarantee_text(
            status="learned", alpha=0.1, relaxation=None, loss_bound=1.0, full_sight_loss=0.0, n=200,
            loss="guardian_regret", binarized=False, router=router, guardian_sees="all", boundary="random",
            missing_guardian=missing, score_digits=12, score=score, learned=terms,
        )  # fmt: skip
        yield summary_lines(alpha=0.1, n=200, router=router, relaxation=None, guardian_sees="all", learned=True)


def uncovered(text):
    return [sentence for sentence in sentences(text) if not any(words in sentence for words in WORDS)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_sentence_of_a_page_that_states_a_bound_is_covered(page):
    assert uncovered(page.read_text()) == [], "add its words and its test to the table in docs/guarantee.md"


def test_every_sentence_of_a_certificate_that_states_a_bound_is_covered():
    texts = [*certificates(), *sure_certificates(), *chains(), *cascade_certificates(), *learned_certificates()]
    assert {sentence for text in texts for sentence in uncovered(text)} == set()


def test_every_word_of_the_table_is_said_somewhere_and_covered_by_a_listed_test():
    pages = [page.read_text() for page in PAGES]
    special = [*sure_certificates(), *chains(), *cascade_certificates(), *learned_certificates()]
    lines = [*set(certificates()), *special, *pages]
    lines = [sentence for text in lines for sentence in sentences(text)]
    assert len(WORDS) > 15
    for words, test in WORDS.items():
        assert any(words in sentence for sentence in lines), words
        assert test in TESTS, test


def test_a_bound_that_nobody_tests_is_caught():
    assert uncovered("The long-run loss is always below alpha. It keeps the budget for every subgroup.") != []
