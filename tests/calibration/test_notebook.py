from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.notebook import html_bars, html_interval, html_paragraph, html_rule, html_table

LEFT = 'style="text-align:left"'


def test_a_table_with_a_header_has_plain_rows():
    assert html_table([["1", "<b>"]], header=["a", "&"]) == (
        "<table><tr><th>a</th><th>&amp;</th></tr><tr><td>1</td><td>&lt;b&gt;</td></tr></table>"
    )


def test_a_table_without_a_header_has_titled_rows():
    assert html_table([["alpha", "0.05"]]) == f"<table><tr><th {LEFT}>alpha</th><td {LEFT}>0.05</td></tr></table>"


def test_a_paragraph_is_escaped():
    assert html_paragraph("a < b") == "<p>a &lt; b</p>"


def test_a_certificate_shows_its_facts_and_its_guarantee(science):
    certificate = calibrate(science, 0.05, guardian_sees="all")
    page = certificate._repr_html_()
    assert f"<th {LEFT}>relaxation</th><td {LEFT}>0.457141</td>" in page
    assert "losses in [0, 1], 2369 rows" in page
    assert page.endswith("</p>")


def test_the_facts_mention_draws_missing_scores_and_deferral():
    rows = {"primary": [None] + [[0.9, 0.1]] * 39, "guardian": [[1.0, 0.0]] * 20 + [None] * 20}
    always = calibrate(ScoreLog.from_arrays(**rows), 0.01, missing_guardian="worst_case")
    facts = dict(always.facts())
    assert facts["relaxation"] == "none: every query is deferred"
    assert facts["missing scores"] == "Primary in 1 row (deferred), Guardian in 20"
    assert "on this log" not in facts
    primary, guardian = [[0.6, 0.5]] * 40, [[0.0, 1.0]] * 40
    random = calibrate(ScoreLog.from_arrays(primary, guardian, id=range(40)), 0.3, boundary="random", key=b"k")
    assert dict(random.facts())["relaxation"] == repr(random.relaxation)
    assert "draws up to 0." in dict(random.further_facts())["at the threshold"]
    alone = calibrate(ScoreLog.from_arrays(primary, [[1.0, 0.0]] * 40), 0.1)
    assert "the Primary's choice stands wherever it leads; ties at the top" in dict(alone.facts())["relaxation"]
    drawn = calibrate(ScoreLog.from_arrays(primary, [[1.0, 0.0]] * 40, id=range(40)), 0.1, boundary="random", key=b"k")
    tied = [drawn.decide([0.5, 0.5], id=f"q{k}").decided_by for k in range(40)]
    assert (drawn.relaxation, set(tied)) == (0, {"guardian"}), "a tie at the top is deferred whatever the draw"
    assert "draw" not in dict(drawn.facts())["rule"] + drawn.summary
    router = ScoreLog.from_router(confidence=[0.5] * 40, primary_grade=[1.0] * 40, guardian_grade=[1.0] * 40)
    assert "wherever its confidence is above 0" in dict(calibrate(router, 0.1).facts())["relaxation"]


def test_bars_are_drawn_to_scale_and_escaped():
    page = html_bars("a < b", [("x", 0.5, "50 %"), ("<y>", 7.0, "")])
    assert page.count("<rect") == 2
    assert 'width="100"' in page
    assert 'width="200"' in page  # never past the end
    assert "&lt;y&gt;" in page
    assert html_bars("none", []) == ""


def test_a_rule_off_the_scale_is_not_drawn():
    assert html_rule(None) == ""
    assert html_rule(1.5) == ""
    assert 'width="115"' in html_rule(0.25)
    assert "lead up to 0.25" in html_rule(0.25)
    router = ScoreLog.from_router(confidence=[0.5] * 40, primary_grade=[1.0] * 40, guardian_grade=[1.0] * 40)
    assert "confidence up to 0: the Guardian decides" in calibrate(router, 0.1)._repr_html_()


def test_an_interval_shows_its_mean_and_marks():
    page = html_interval("loss", (0.02, 0.1), 0.05, [("alpha", 0.05), ("red", 0.08)])
    assert page.count("<rect") == 4
    assert "alpha 0.05" in page
    assert "loss: 0.02 to 0.1<" in page
    equal = html_interval("loss", (0.02, 0.1), 0.05, [("alpha", 0.05), ("red", 0.05)])
    assert "alpha, red 0.05" in equal
    assert html_interval("loss", (0.0, 0.0), None, []).count("<rect") == 1
