"""Kinds of scorers: the built-in table, and packages that add one through an entry point."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.kinds import ModelConfig
from conformal_arbitrage.models.others import BUILT_IN, ENTRY_POINT_GROUP, kind_named, kind_names
from conformal_arbitrage.models.rendering import RENDERING

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scorer_kind"
CONFIG = """\
alpha = 0.4

[primary]
kind = "keywords"
words = {refund = 0.7, sorry = 0.2}

[guardian]
kind = "keywords"
words = {refund = 1.0}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package visible as pip would: its metadata and its code on the import path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def add(package, entries, **modules):
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        listed = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{listed}")
        for name, source in modules.items():
            (site / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)

    return add


@pytest.fixture
def example(install):
    """The package in examples/scorer_kind, as its own pyproject.toml declares it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    modules = {path.stem: path.read_text() for path in EXAMPLE.glob("*.py")}
    install(project["name"], project["entry-points"][ENTRY_POINT_GROUP], **modules)


def write(folder, text=CONFIG):
    path = folder / "arbitrage.toml"
    path.write_text(text)
    return path


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def test_every_built_in_kind_is_registered_under_its_own_tag():
    assert all(config.__struct_config__.tag == name for name, config in BUILT_IN.items())
    assert all(config.build is not ModelConfig.build for config in BUILT_IN.values())
    assert kind_names()[: len(BUILT_IN)] == list(BUILT_IN)


def test_check_collect_calibrate_and_ask_work_with_a_kind_of_another_package(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    rows = [{"id": f"q{n}", "question": "What now?", "choices": ["Refund it.", "Sorry, no."]} for n in range(20)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = json.loads(run("check", "--json").stdout)["models"]
    assert [(model["kind"], model["problem"]) for model in models] == [("keywords", None)] * 2
    run("collect", "questions.jsonl", "-o", "log.parquet", "--json")
    log = ScoreLog.read("log.parquet")
    assert log.primary.tolist() == [0.7, 0.2] * 20
    assert log.guardian.tolist() == [1.0, 0.0] * 20
    words = {"kind": "keywords", "words": "[('refund', 0.7), ('sorry', 0.2)]"}
    assert log.identities["primary"] == {**words, "rendering": RENDERING}
    run("calibrate", "log.parquet", "-o", "certificate.json", "--json")
    options = ["--action", "Sorry.", "--action", "A refund."]
    assert json.loads(run("ask", "certificate.json", "Now?", *options, "--json").stdout)["answer"] == "A refund."


def test_a_bad_section_of_such_a_kind_is_refused_with_the_line_and_the_nearest_key(example, tmp_path):
    with pytest.raises(ConfigError, match=r"line 5: there is no key 'wrods'; did you mean 'words'\?"):
        read_config(write(tmp_path, CONFIG.replace("words =", "wrods =", 1)))
    with pytest.raises(ConfigError, match=r"Invalid value 'keyword'; did you mean 'keywords'\?"):
        read_config(write(tmp_path, CONFIG.replace('"keywords"', '"keyword"', 1)))


def test_an_unknown_kind_lists_all_kinds_without_loading_any_package(example, tmp_path):
    with pytest.raises(ConfigError, match=r"valid kinds are chat, .*, local, keywords"):
        read_config(write(tmp_path, CONFIG.replace('"keywords"', '"zzz"')))
    assert "keyword_kind" not in sys.modules
    assert kind_named("zzz") is None


BASE = "from conformal_arbitrage.models import ModelConfig\nclass Config(ModelConfig, frozen=True, tag={!r}): pass\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "cannot be loaded (ZeroDivisionError: division by zero)"),
        ("def broken(:", "cannot be loaded (SyntaxError"),
        ("raise ValueError('two\\nlines')", "cannot be loaded (ValueError: two lines)"),
        ("", "cannot be loaded (AttributeError"),
        ("import no_such_module_at_all", "cannot be loaded (ModuleNotFoundError"),
        ("Config = 7", "is not a subclass of ModelConfig"),
        ("class Config: pass", "is not a subclass of ModelConfig"),
        (BASE.format("other"), "has the tag 'other'"),
        (BASE.format("odd"), "does not define `build`"),
    ],
)
def test_a_broken_package_is_named_with_the_line_that_asks_for_it(source, reason, install, tmp_path):
    install("odd-kind", {"odd": "odd_kind:Config"}, odd_kind=source)
    path = write(tmp_path, '[primary]\nkind = "odd"\n[guardian]\nkind = "human"\nname = "team"\n')
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert f"{path}: line 2: kind 'odd' of package odd-kind (odd_kind:Config) {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_package_does_no_harm_until_a_configuration_names_it(install, tmp_path):
    install("odd-kind", {"odd": "odd_kind:Config"}, odd_kind="1 / 0")
    human = '[primary]\nkind = "human"\nname = "one"\n[guardian]\nkind = "human"\nname = "two"\n'
    assert read_config(write(tmp_path, human)).primary.kind == "human"
    assert "odd" in kind_names()


def test_two_packages_that_add_the_same_kind_are_both_named(install):
    install("one-kind", {"odd": "one_kind:Config"}, one_kind="")
    install("two-kind", {"odd": "two_kind:Config"}, two_kind="")
    with pytest.raises(ConfigError, match="kind 'odd' is added by one-kind and two-kind; uninstall one of them"):
        kind_named("odd")


def test_a_package_cannot_replace_a_built_in_kind(install):
    install("odd-kind", {"chat": "odd_kind:Config"}, odd_kind="1 / 0")
    assert kind_named("chat") is BUILT_IN["chat"]
    assert kind_names().count("chat") == 1
