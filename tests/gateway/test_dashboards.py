"""The dashboard of Grafana and the alert rules of Prometheus fit what /metrics says."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.durability import ROOT

DEPLOY = ROOT / "deploy"


def rules():
    return yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]


def dashboard():
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())


def expressions():
    """Every query of the rules and of the dashboard."""
    alerts = [rule["expr"] for group in rules() for rule in group["rules"]]
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    variables = [
        re.search(r"label_values\((\w+),", one["definition"])[1] for one in dashboard()["templating"]["list"][1:]
    ]
    return [*alerts, *panels, *variables]


@pytest.fixture
def families(house):
    """The metrics after one request: by name of a sample, its labels."""
    gateway = house()
    assert gateway.decide().status_code == 200
    named = {}
    for family in text_string_to_metric_families(gateway.get("/metrics").text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for suffix in suffixes:
            named[family.name + suffix] = {label for sample in family.samples for label in sample.labels}
    return named


def test_every_query_names_a_metric_that_exists_and_labels_that_it_has(families):
    for expression in expressions():
        names = re.findall(r"\barbitrage_\w+", expression)
        assert names, expression
        assert not [name for name in names if name not in families], expression
        for name, labels in re.findall(r"(arbitrage_\w+){([^}]*)}", expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", labels)) - {"job", "instance"}
            known = families[name] or used  # a metric without samples yet shows no labels
            assert used <= known, expression


def test_the_dashboard_shows_each_kind_of_metric_and_the_rules_each_danger(families):
    shown = {name for expression in expressions() for name in re.findall(r"\barbitrage_\w+", expression)}
    for name in ("decisions", "deferred", "cost_dollars", "upstream_errors", "log_lines_dropped", "connections_closed"):
        assert f"arbitrage_{name}_total" in shown
    assert all({"summary", "description"} <= set(rule["annotations"]) for group in rules() for rule in group["rules"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should():
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus")
def test_promtool_accepts_the_metrics_and_every_query_of_the_dashboard(house, tmp_path):
    gateway = house()
    gateway.decide()
    text = gateway.get("/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert "error" not in (done.stdout + done.stderr).lower(), done.stderr
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    listed = [{"record": f"q{k}", "expr": query.replace("$__rate_interval", "5m")} for k, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": listed}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
