import sys
from pathlib import Path

import pytest

from conformal_arbitrage import OptionError, evaluate


@pytest.fixture(scope="module")
def frontier(science):
    return evaluate(
        science, [0.05, 0.1], calibration_size=500, trials=3, probabilities=[0.5], primary_cost=1, guardian_cost=9
    )


@pytest.mark.parametrize("x", ["cost", "loss"])
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_frontier_is_saved_in_any_format(tmp_path, frontier, x, ending):
    frontier.plot(tmp_path / f"f.{ending}", x=x)
    assert (tmp_path / f"f.{ending}").stat().st_size > 5000


def test_the_figure_names_every_policy_and_budget(tmp_path, frontier):
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        frontier.plot(tmp_path / "f.svg", x="loss")
    text = (tmp_path / "f.svg").read_text()
    for words in (
        "Primary alone",
        "Guardian alone",
        "random routing between the two",
        "α = 0.05",
        "α = 0.1",
        "loss on held-out rows",
    ):
        assert words in text


def test_an_unknown_axis_is_rejected(tmp_path, frontier):
    with pytest.raises(OptionError, match="no 'speed' to draw; there is cost, loss, correct"):
        frontier.plot(tmp_path / "f.png", x="speed")
    assert list(tmp_path.iterdir()) == []


def test_a_frontier_draws_itself_on_new_or_given_axes(frontier):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.pyplot import close

    ax = frontier.plot()
    assert isinstance(ax, Axes)
    assert ax.get_xlabel() == "cost, dollars per 1000 queries"
    close(ax.figure)
    own = Figure().add_subplot()
    assert frontier.plot(own, x="loss", y="correct") is own
    assert own.get_ylabel() == "correct, mean over held-out rows"


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_plot_is_saved_to_the_file_that_is_named(frontier, tmp_path, as_path):
    file = tmp_path / "fig.png"
    assert frontier.plot(as_path(file)).get_xlabel() == "cost, dollars per 1000 queries"
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_costs_a_frontier_is_drawn_over_the_loss(science):
    from matplotlib.figure import Figure

    bare = evaluate(science, [0.05], calibration_size=500, trials=2)
    assert bare.plot(Figure().add_subplot()).get_xlabel() == "loss on held-out rows"


@pytest.mark.parametrize("file", [None, "f.png"])
def test_plotting_without_matplotlib_says_what_to_install(frontier, monkeypatch, tmp_path, file):
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        frontier.plot(None if file is None else tmp_path / file)
