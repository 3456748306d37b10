"""Batch certificates: the rule on arrays, against enumeration of every pattern and every draw."""

import csv
import json
import re
from fractions import Fraction
from itertools import combinations, product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from conformal_arbitrage import Certificate, CertificateError, OptionError, ProjectSecret, calibrate, verify
from conformal_arbitrage.calibration import batch, certificate
from conformal_arbitrage.calibration.batch import BatchDraw, BatchLabels, certify_batch, certify_labels
from conformal_arbitrage.calibration.certificate import issue
from conformal_arbitrage.calibration.promises import WRONG_LABEL, Batch, Cutoff, Evidence
from conformal_arbitrage.core.bounds import accepts_sample, hypergeometric_cdf, hypergeometric_limit

VECTORS = Path(__file__).parents[1] / "recorded" / "batch_limits.csv"


def rows_of(path):
    with path.open() as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("row", rows_of(VECTORS), ids=lambda row: "-".join(row.values()))
def test_the_limit_is_the_recorded_one(row):
    items, sample = int(row["items"]), int(row["sample"])
    allowed = int(Fraction(row["error"]) * items)
    assert hypergeometric_limit(items, allowed, sample, 1 - Fraction(row["confidence"])) == int(row["limit"])


def exact_cdf(k, items, bad, sample):
    ways = sum(comb(bad, j) * comb(items - bad, sample - j) for j in range(max(0, sample - items + bad), k + 1))
    return Fraction(ways, comb(items, sample))


def test_the_probability_is_that_of_integers():
    rng = np.random.default_rng(5)
    for _ in range(1500):
        items = int(rng.integers(1, 60 if rng.random() < 0.5 else 3000))
        bad, sample = (int(rng.integers(0, items + 1)) for _ in range(2))
        k = int(rng.integers(0, min(bad, sample) + 1))
        expected = float(exact_cdf(k, items, bad, sample))
        assert hypergeometric_cdf(k, items, bad, sample) == pytest.approx(expected, rel=1e-11, abs=1e-290)


def test_the_probability_among_many_items_is_that_of_integers():
    items, bad, sample, k = 400_000, 20_060, 2_000, 84
    expected = float(exact_cdf(k, items, bad, sample))
    assert hypergeometric_cdf(k, items, bad, sample) == pytest.approx(expected, rel=1e-13)


def test_a_probability_that_equals_the_level_is_within_it():
    level = exact_cdf(1, 40, 6, 20)  # allowed 4 and k = 1
    assert hypergeometric_limit(40, 4, 20, level) == 1
    assert hypergeometric_limit(40, 4, 20, level - Fraction(1, 10**15)) == 0


def test_a_hundred_million_items_take_no_time_that_matters():
    limit = hypergeometric_limit(10**8, 5 * 10**6, 10**5, Fraction(1, 20))
    assert hypergeometric_cdf(limit, 10**8, 5 * 10**6 + limit + 1, 10**5) <= 0.05
    assert hypergeometric_cdf(limit + 1, 10**8, 5 * 10**6 + limit + 2, 10**5) > 0.05


# --- Every pattern of wrong labels, and every draw ---


def ordered_draws(items, sample, pilot):
    """Return every draw, a pilot first."""
    return [
        np.array([*trains, *certifies], dtype=np.int64)
        for trains in combinations(range(items), pilot)
        for certifies in combinations([row for row in range(items) if row not in trains], sample - pilot)
    ]


def failures(items, sample, error, level, *, pilot=0, risk=None, draws=None):
    """Return the largest share of draws, over all patterns of wrong labels, that keep more wrong ones than allowed."""
    allowed, worst = int(Fraction(error) * items), Fraction(0)
    risk = np.arange(items, dtype=float) if risk is None else risk
    draws = ordered_draws(items, sample, pilot) if draws is None else draws
    for pattern in product([0.0, 1.0], repeat=items):
        if sum(pattern) <= allowed:
            continue
        failed = sum(wrong_kept(np.array(pattern), risk, rows, error, level, pilot) > allowed for rows in draws)
        worst = max(worst, Fraction(failed, len(draws)))
    return worst


def wrong_kept(pattern, risk, rows, error, level, pilot=0):
    """Return how many wrong labels are kept after one draw."""
    draw = BatchDraw(
        items=len(risk), rows=rows, error=float(Fraction(error)), level=level, confidence=1 - level, pilot=pilot
    )
    labels = BatchLabels(risk=risk, labelled=np.ones(len(risk), bool), draw=draw, wrong=pattern[rows])
    kept = labels.kept(certify_labels(labels).rule)
    return int(pattern[kept].sum())


CASES = [(4, 2, "0", 0.5), (5, 3, "0.2", 0.3), (6, 3, "0.2", 0.4), (6, 4, "0.1", 0.3), (6, 5, "0", 0.2)]


@pytest.mark.parametrize(("items", "sample", "error", "level"), CASES)
def test_no_pattern_of_wrong_labels_fails_more_often_than_promised(items, sample, error, level):
    assert failures(items, sample, error, level) <= Fraction(str(level))


def test_the_level_is_reached():
    assert failures(4, 2, "0", 0.5) == Fraction(1, 2)


def planted_limit(shift=0, bad=1, whole=0):
    def limit(items, allowed, sample, delta):
        largest = -1
        for k in range(sample + 1):
            wrong = allowed + k + bad
            if wrong > items or exact_cdf(k, items, wrong, sample) <= delta:
                largest = k
            else:
                break
        return min(largest + shift, sample)

    return limit


@pytest.mark.parametrize("bug", [planted_limit(shift=1), planted_limit(bad=2)], ids=["k + 1", "one bad item too many"])
def test_a_limit_that_is_too_high_is_caught(bug, monkeypatch):
    monkeypatch.setattr(batch, "hypergeometric_limit", planted_limit())
    kept = [failures(*case) <= Fraction(str(case[3])) for case in CASES]
    monkeypatch.setattr(batch, "hypergeometric_limit", bug)
    monkeypatch.setattr(certificate, "hypergeometric_limit", bug)
    assert all(kept)
    assert not all(failures(*case) <= Fraction(str(case[3])) for case in CASES)


def test_the_wrong_items_without_the_further_one_are_a_lower_limit():
    """m instead of m + 1: P(Hyper(n, m + k) <= k) is larger, so that less is kept; the promise is not exact any more."""
    plain = [planted_limit()(n, int(Fraction(e) * n), k, Fraction(str(d))) for n, k, e, d in CASES]
    without = [planted_limit(bad=0)(n, int(Fraction(e) * n), k, Fraction(str(d))) for n, k, e, d in CASES]
    assert plain != without
    assert all(low <= high for low, high in zip(without, plain, strict=True))


def test_a_sample_with_replacement_is_caught(monkeypatch):
    nominal = hypergeometric_limit
    monkeypatch.setattr(batch, "hypergeometric_limit", lambda n, m, sample, level: nominal(n, m, 3, level))
    monkeypatch.setattr(certificate, "hypergeometric_limit", lambda n, m, sample, level: nominal(n, m, 3, level))
    assert failures(5, 3, "0.2", 0.3) <= Fraction(3, 10)
    repeated = [np.array(sorted(set(drawn)), dtype=np.int64) for drawn in product(range(5), repeat=3)]
    assert failures(5, 3, "0.2", 0.3, draws=repeated) > Fraction(3, 10)


PILOTS = [(5, 3, "0", 0.5, 1), (6, 4, "0", 0.4, 1), (6, 4, "0.2", 0.4, 2), (7, 5, "0.1", 0.3, 2)]


@pytest.mark.proof
def test_a_pilot_leaves_the_promise_as_it_is_and_the_limit_of_the_whole_is_caught(monkeypatch):
    assert all(failures(*case[:4], pilot=case[4]) <= Fraction(str(case[3])) for case in PILOTS)
    for items, sample, error, level, pilot in PILOTS:
        whole = hypergeometric_limit(items, int(Fraction(error) * items), sample, Fraction(str(level)))
        monkeypatch.setattr(batch, "hypergeometric_limit", lambda *_, whole=whole: whole)
        if failures(items, sample, error, level, pilot=pilot) > Fraction(str(level)):
            return
    pytest.fail("a limit computed with all items was not caught")


def test_ties_are_broken_whatever_was_sampled_and_ties_by_the_draw_are_caught(monkeypatch):
    risk, case = np.zeros(6), (6, 4, "0.1", 0.4)
    assert failures(*case, risk=risk) <= Fraction(2, 5)

    def sampled_last(self, rows):
        ties = np.zeros(len(self.risk), np.int64)
        ties[self.draw.rows] = 1 + np.arange(len(self.draw.rows))
        return ties[rows]

    monkeypatch.setattr(BatchLabels, "ties", sampled_last)
    assert failures(*case, risk=risk) > Fraction(2, 5)


# --- The certificate ---


def labelled_batch(seed=1, n=400, sample=120, error=0.1, confidence=0.9):
    rng = np.random.default_rng(seed)
    risk = np.round(rng.random(n), 2)
    wrong = rng.random(n) < risk**2
    rows = rng.permutation(n)[:sample]
    return risk, rows, wrong, certify_batch(risk, rows, wrong[rows], error=error, confidence=confidence)


def labels_of(risk, rows, wrong, error=0.1, confidence=0.9):
    draw = BatchDraw(
        items=len(risk), rows=rows, error=error, level=float(1 - Fraction(str(confidence))), confidence=confidence
    )
    return BatchLabels(risk=risk, labelled=np.ones(len(risk), bool), draw=draw, wrong=wrong[rows].astype(float))


def test_a_certificate_says_what_is_kept_and_is_verified_to_the_bit(tmp_path):
    risk, rows, wrong, certified = labelled_batch()
    labels = labels_of(risk, rows, wrong)
    kept = labels.kept(certified.rule)
    assert kept.sum() == certified.rule.kept > 0
    assert not kept[rows].any()
    assert "at most 40 of the" in certified.guarantee
    assert "probability at least 0.9" in certified.guarantee
    assert "Nothing is assumed about the items" in certified.guarantee
    signed = certified.sign(ProjectSecret((b"a secret of these tests",)))
    signed.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json", secret=ProjectSecret((b"a secret of these tests",)))
    assert loaded == signed
    assert verify(loaded, labels).ok
    turned = wrong.copy()
    turned[rows[0]] ^= True
    assert not verify(loaded, labels_of(risk, rows, turned)).ok


def test_the_representation_has_the_figure():
    page = labelled_batch()[3]._repr_html_()
    assert page.startswith("<table>")
    assert "<svg" in page
    assert "left to experts" in page


def test_the_caption_of_the_figure_fits_into_it_however_many_items_there_are():
    cutoff = Cutoff(keeps="below", risk=0.5, tie=0, kept=31_340_680)
    promise = Batch(error=0.05, confidence=0.95, level=0.05, sample=50_000, limit=2331)
    evidence = Evidence(n=100_000_000, log_sha256="0" * 64, empirical_risk=0.5)
    figure = certificate.batch_figure(issue(cutoff, promise, WRONG_LABEL, evidence, identities="unbound", key=None))
    (caption,) = re.findall(r'aria-label="([^"]+)"', figure)
    assert len(caption) <= 76, "of 460 pixels, 6 each"


def test_labels_without_a_verdict_count_as_wrong_and_items_without_a_label_are_never_kept():
    risk, rows, wrong, certified = labelled_batch()
    unsaid = [None if k < 5 else bool(said) for k, said in enumerate(wrong[rows])]
    cautious = certify_batch(risk, rows, unsaid, error=0.1, confidence=0.9)
    assert cautious.evidence.missing_guardian_rows == 5
    assert cautious.rule.kept <= certified.rule.kept
    labelled = np.arange(len(risk)) % 2 == 0
    unknown = np.where(labelled, risk, np.nan)
    half = certify_batch(unknown, rows, wrong[rows], error=0.1, confidence=0.9, labelled=labelled)
    assert half.rule.kept <= labelled.sum()


def test_the_edges():
    risk, wrong = np.arange(10.0), np.zeros(10)
    everything = certify_batch(risk, np.arange(10), wrong, error=0, confidence=0.9)
    assert (everything.rule.keeps, everything.rule.kept) == ("none", 0)
    nothing = certify_batch(risk, [], [], error=0.2, confidence=0.9)
    assert (nothing.promise.limit, nothing.rule.kept) == (-1, 2)  # the two least risky, whatever else holds
    none = certify_batch(risk, [], [], error=0, confidence=0.9)
    assert none.rule.keeps == "none"
    assert "experts label every item" in none.guarantee
    most = certify_batch(risk, [0, 1], [True, True], error=0.9, confidence=0.9)
    assert most.rule.keeps == "all"
    for certificate_ in (everything, nothing, none, most):
        assert Certificate.from_dict(certificate_.to_dict()) == certificate_


def test_values_chosen_after_the_labels_promise_nothing():
    risk, rows, wrong, _ = labelled_batch()
    draw = labels_of(risk, rows, wrong).draw
    same = certify_batch(risk, draw, wrong[rows], error="0.1", confidence="0.9")
    other = certify_batch(risk, draw, wrong[rows], error=0.2)
    assert not same.promise.chosen_after
    assert other.promise.chosen_after
    assert other.guarantee.startswith("There is no guarantee")
    assert Certificate.from_dict(other.to_dict()) == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"risk": [0.1, float("nan"), 0.3]}, "item 1 has risk nan"),
        ({"risk": [[0.1], [0.2], [0.3]]}, "one number per item"),
        ({"risk": ["high", "low", "low"]}, "one number per item"),
        ({"sampled": [0, 0]}, "twice"),
        ({"sampled": [0, 3]}, "numbered from 0 to 2"),
        ({"sampled": [0.5, 1.0]}, "numbers of the items"),
        ({"wrong": [True]}, "2 here"),
        ({"wrong": [True, 7]}, "verdict 1 is 7"),
        ({"error": 5}, "5 % is 0.05"),
        ({"error": -0.1}, "0 or more"),
        ({"confidence": 95}, "95 % is 0.95"),
        ({"confidence": None}, "as they were fixed before the draw"),
        ({"labelled": [True]}, "one truth value per item"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_remedy(change, message):
    given = {
        "risk": [0.1, 0.2, 0.3],
        "sampled": [0, 2],
        "wrong": [True, False],
        "error": 0.1,
        "confidence": 0.9,
    } | change
    with pytest.raises(OptionError, match=message):
        certify_batch(given.pop("risk"), given.pop("sampled"), given.pop("wrong"), **given)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["promise"].update(limit=d["promise"]["limit"] + 1),
        lambda d: d["promise"].update(error=0.11),
        lambda d: d["promise"].update(confidence=0.99),
        lambda d: d["rule"].update(kept=500),
        lambda d: d["rule"].update(risk=None),
        lambda d: d["evidence"].update(empirical_risk=1.5),
        lambda d: d["loss"].update(bound=2.0),
        lambda d: d.update(promise={"type": "average", "alpha": 0.1}),
        lambda d: d.update(guarantee="all is well"),
    ],
)
def test_a_contradictory_certificate_is_refused(spoil):
    document = json.loads(json.dumps(labelled_batch()[3].to_dict()))
    spoil(document)
    with pytest.raises(CertificateError):
        Certificate.from_dict(document)


def test_what_decides_queries_refuses_a_batch(science):
    certified = labelled_batch()[3]
    for use in (
        lambda: certified.decide([0.9, 0.1], id="a"),
        lambda: certified.apply(science),
        lambda: verify(certified, science),
    ):
        with pytest.raises(CertificateError, match="certificate of a batch"):
            use()
    ordinary = calibrate(science, 0.05).to_dict()
    with pytest.raises(CertificateError):
        Certificate.from_dict({**ordinary, "rule": certified.to_dict()["rule"]})


def test_the_draws_are_siphash():
    """The reference vector of its authors for the key 00 01 .. 0f and the message 00 01 .. 07."""
    key = np.frombuffer(bytes(range(16)), "<u8")
    word = np.frombuffer(bytes(range(8)), "<u8")
    assert [hex(value) for value in batch.sip_hashes(key, word).tolist()] == ["0x93f5f5799a932462"]


def test_draws_do_not_depend_on_the_places_of_items_and_domains_have_nothing_to_do_with_each_other():
    names = np.random.default_rng(0).integers(1 << 63, size=50_000, dtype=np.uint64)
    ties, sample = batch.keyed_words(b"key", "ties", names), batch.keyed_words(b"key", "sample", names)
    order = np.random.default_rng(1).permutation(len(names))
    assert np.array_equal(batch.keyed_words(b"key", "ties", names[order]), ties[order])
    assert ties.min() >= 0
    assert abs(np.corrcoef(ties, sample)[0, 1]) < 0.02
    assert abs(np.corrcoef(ties, batch.keyed_words(b"kez", "ties", names))[0, 1]) < 0.02
    assert abs(np.mean(ties < 1 << 62) - 0.5) < 0.01


def test_items_that_are_alike_are_told_apart_by_their_place():
    hashes = np.array([5, 7, 5, 5, 9, 7], dtype=np.uint64)
    names = batch.names_of(hashes)
    assert len(set(names.tolist())) == 6
    assert names[[0, 1, 4]].tolist() == [5, 7, 9]


# --- Graded losses ---


def graded_batch(items=2000, sample=400):
    rng = np.random.default_rng(3)
    risk = rng.random(items)
    loss, rows = np.round(risk * rng.random(items), 2), rng.permutation(items)[:sample]
    draw = BatchDraw(items=items, rows=rows, error=0.1, level=0.1, confidence=0.9, graded=True)
    return BatchLabels(risk=risk, labelled=np.ones(items, bool), draw=draw, wrong=loss[rows]), loss


def test_graded_losses_of_the_labels_kept_add_up_to_what_is_promised(tmp_path):
    labels, loss = graded_batch()
    certified = certify_labels(labels)
    kept = labels.kept(certified.rule)
    assert 100 < loss[kept].sum() <= 200
    assert certified.promise.limit is None
    assert "add up to at most 0.1 times 2000." in certified.guarantee
    assert "losses of 200" in dict(certified.facts())["wrong labels"]
    certified.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert verify(loaded, labels).ok
    document = json.loads(json.dumps(loaded.to_dict()))
    document["promise"]["limit"] = 30
    with pytest.raises(CertificateError):
        Certificate.from_dict(document)
    draw = labels.draw
    ours = certify_batch(labels.risk, draw.rows, labels.wrong, error=0.1, confidence=0.9, graded=True)
    assert ours.rule == certified.rule


def test_a_loss_that_nobody_knows_is_a_whole_one():
    labels, _ = graded_batch()
    rules = []
    for loss in (1.0, np.nan):
        said = labels.wrong.copy()
        said[::20] = loss
        changed = BatchLabels(risk=labels.risk, labelled=labels.labelled, draw=labels.draw, wrong=said)
        rules.append(certify_labels(changed).rule)
    assert rules[0] == rules[1]
    assert rules[0].kept < certify_labels(labels).rule.kept


def test_larger_losses_are_never_accepted_where_smaller_ones_are_not():
    rng, accepted = np.random.default_rng(7), []
    for _ in range(2000):
        losses = rng.random(30) * rng.random()
        more = np.minimum(losses + rng.random(30) * (rng.random(30) < 0.2), 1.0)
        bets = rng.random(30)
        accepted.append([accepts_sample(some, 60, 20.0, 0.2, bets) for some in (losses, more)])
    assert (True, False) in set(map(tuple, accepted))
    assert (False, True) not in set(map(tuple, accepted))


def test_graded_losses_are_refused_out_of_range_and_in_another_order_than_drawn():
    given = {"error": 0.1, "confidence": 0.9, "graded": True}
    with pytest.raises(OptionError, match="a loss from 0 to 1"):
        certify_batch([0.1, 0.2, 0.3], [2, 0], [0.5, 1.5], **given)
    with pytest.raises(OptionError, match="pass the items as drawn"):
        certify_batch(np.arange(9) / 9, [1, 3, 5, 8], [0.5, 0, 0, 0], **given)
