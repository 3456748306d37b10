"""Finding the user's code by MODULE:NAME, and translating what it raises."""

import asyncio
import sys

import pytest

from conformal_arbitrage.errors import ConfigError, OptionError, ReplyError
from conformal_arbitrage.models.kinds import UserCode, load_object


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of modules, beside an empty current folder; imports are undone after the test."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_a_module_in_the_folder_is_found_and_the_import_path_stays_as_it_was(folder):
    (folder / "uc_rules.py").write_text("def rule(query): return [1]\n")
    before = sys.path[:]
    assert load_object("uc_rules:rule", folder)(None) == [1]
    assert sys.path == before


def test_a_module_in_the_current_folder_is_found_wherever_the_configuration_lies(folder):
    (folder / "here" / "uc_current.py").write_text("value = 3\n")
    assert load_object("python:uc_current:value", folder) == 3
    assert load_object("uc_current:value") == 3


def test_the_folder_of_the_configuration_comes_before_the_current_one(folder):
    (folder / "uc_both.py").write_text("value = 'configuration'\n")
    (folder / "here" / "uc_both.py").write_text("value = 'current'\n")
    assert load_object("uc_both:value", folder) == "configuration"


def test_packages_and_neighbouring_modules_can_be_imported(folder):
    package = folder / "uc_package"
    (package / "inner").mkdir(parents=True)
    for part in (package, package / "inner"):
        (part / "__init__.py").write_text("")
    (package / "inner" / "rules.py").write_text("from uc_neighbour import value\nfrom ..top import other\n")
    (package / "top.py").write_text("other = 2\n")
    (folder / "uc_neighbour.py").write_text("value = 1\n")
    assert load_object("uc_package.inner.rules:value", folder) == 1
    assert load_object("uc_package.inner.rules:other", folder) == 2


def test_two_names_of_one_module_share_it(folder):
    (folder / "uc_shared.py").write_text("one = two = object()\n")
    assert load_object("uc_shared:one", folder) is load_object("uc_shared:two", folder)


def test_installed_modules_are_found_as_ever(folder):
    assert load_object("operator:attrgetter", folder) is __import__("operator").attrgetter


@pytest.mark.parametrize("source", ["1 / 0", "def broken(:", "import uc_no_such_module", "raise StopIteration"])
def test_a_module_that_fails_on_import_is_one_line_and_leaves_the_import_path_as_it_was(folder, source):
    (folder / "uc_broken.py").write_text(source)
    before = sys.path[:]
    with pytest.raises(ConfigError, match="'uc_broken:rule' cannot be loaded") as caught:
        load_object("uc_broken:rule", folder)
    assert "\n" not in str(caught.value)
    assert sys.path == before


@pytest.mark.parametrize("name", ["uc_nothing:rule", "operator:nothing", "operator", "", ":rule"])
def test_a_name_that_leads_nowhere_is_refused(folder, name):
    with pytest.raises(ConfigError, match=r"cannot be loaded .*; write MODULE:NAME of a Python object"):
        load_object(name, folder)


def translate(error):
    return OptionError(f"translated {error!r}")


def test_whatever_the_users_code_raises_is_translated_with_its_cause():
    with pytest.raises(OptionError, match="translated KeyError") as caught, UserCode(translate):
        raise KeyError("lost")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [ReplyError("x"), KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_scorer_errors_interrupts_and_cancellations_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, UserCode(translate):
        raise error
    assert caught.value is error
