import pytest
from benchmarks.crossings import calibration, measure, review_modules, upward


@pytest.fixture(scope="module")
def measured():
    return measure()


@pytest.mark.parametrize(
    ("request_name", "most"),
    [
        ("menu, answered by the Primary", 25),
        ("text, answered by the Primary", 25),
        ("text, a deferred stream of three words", 65),
    ],
)
def test_a_request_makes_few_calls_between_modules_and_none_to_a_higher_layer(measured, request_name, most):
    watch = measured[request_name]
    assert watch.calls.total() <= most, watch.functions
    assert not upward(watch.calls)


def test_a_review_adds_five_modules_to_the_road_of_a_decision():
    assert review_modules() == {
        "gateway.api", "gateway.review_queue", "live.reviewers", "monitoring.votes", "store.reviews",
    }  # fmt: skip


def test_a_calibration_goes_through_few_modules_and_crosses_between_them_seldom():
    (watch,) = calibration().values()
    assert len({name for pair in watch.calls for name in pair}) <= 15, watch.calls
    assert watch.calls.total() <= 120, watch.functions
