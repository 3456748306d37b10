import importlib
import pkgutil
import warnings

import pytest

import conformal_arbitrage
from conformal_arbitrage import deprecation
from conformal_arbitrage.deprecation import Deprecation, deprecated, renamed_keyword


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    """A list of its own, so that what tests mark is no business of the package's."""
    monkeypatch.setattr(deprecation, "DEPRECATIONS", marked := [])
    return marked


def test_a_deprecated_function_warns_its_caller_and_does_its_work():
    @deprecated(instead="total()", since="1.2.0", until="2.0.0")
    def add(a, b):
        """Return the sum."""
        return a + b

    notice = r"add\(\) is deprecated since 1\.2\.0, and removed in 2\.0\.0; use total\(\) instead$"
    with pytest.warns(DeprecationWarning, match=notice) as caught:
        assert add(1, b=2) == 3
    assert caught[0].filename == __file__
    assert add.__doc__ == "Return the sum."


def test_a_renamed_keyword_means_the_new_one():
    @renamed_keyword("budget", "alpha", since="1.2.0", until="2.0.0")
    def certify(log, *, alpha):
        return log, alpha

    with pytest.warns(DeprecationWarning, match=r"certify\(budget=...\) is deprecated .* use alpha=... instead"):
        assert certify("log", budget=0.05) == ("log", 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert certify("log", alpha=0.05) == ("log", 0.05)
    with pytest.raises(TypeError, match="got budget and alpha, which are one keyword; leave out budget"):
        certify("log", alpha=0.05, budget=0.1)


def test_what_a_release_should_have_removed_is_found(marked):
    deprecated(instead="b", since="0.9.0", until="0.10.0")(lambda: None)
    [notice] = marked
    assert [notice.overdue(version) for version in ("0.9.9", "0.10.0", "1.0.0")] == [False, True, True]


def test_nothing_in_the_package_is_overdue(monkeypatch):
    monkeypatch.undo()
    for module in pkgutil.walk_packages(conformal_arbitrage.__path__, "conformal_arbitrage."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    overdue = [notice for notice in deprecation.DEPRECATIONS if notice.overdue(conformal_arbitrage.__version__)]
    assert overdue == []
    assert Deprecation(name="a", instead="b", since="0.0.1", until="0.1.0").overdue(conformal_arbitrage.__version__)
