"""The files in deploy/ say what the package does: its commands, routes, settings and variables; nothing runs as root."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from conformal_arbitrage.cli import cli
from conformal_arbitrage.gateway.api import schema
from conformal_arbitrage.gateway.auth import FIRST_KEY
from conformal_arbitrage.live.config import GatewayConfig, read_config

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
MANIFESTS = {
    document["kind"]: document
    for path in (DEPLOY / "kubernetes").glob("*.yaml")
    for document in yaml.safe_load_all(path.read_text())
}
UNIT = (DEPLOY / "systemd" / "arbitrage.service").read_text()


def pod(kind):
    return MANIFESTS[kind]["spec"]["template"]["spec"]


def container(kind):
    [one] = pod(kind)["containers"]
    return one


def dockerfile(name):
    *_, found = re.findall(rf"^{name} [^\[\n]*(\[.*\])$", DOCKERFILE, re.MULTILINE)
    return json.loads(found)


COMMANDS = {
    "image": dockerfile("CMD"),
    "compose, migrate": COMPOSE["services"]["migrate"]["command"],
    "compose, gateway": COMPOSE["services"]["gateway-1"]["command"],
    "job": container("Job")["args"],
    "deployment": container("Deployment")["args"],
    "systemd": shlex.split(re.search("^ExecStart=(.*)$", UNIT, re.MULTILINE)[1])[1:],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_one_of_ours(name):
    words, command = list(COMMANDS[name]), cli
    while words and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(0))
    command.make_context("arbitrage", [word for word in words if word != "--config" and not word.startswith("/etc/")])
    assert "--config" in words


def test_gateways_of_a_fleet_change_nothing_and_a_job_runs_before_them():
    for name in ("compose, gateway", "deployment"):
        assert "--no-migrate" in COMMANDS[name]
    for name in ("compose, migrate", "job"):
        assert COMMANDS[name][:2] == ["records", "migrate"]
    for gateway in ("gateway-1", "gateway-2"):
        assert COMPOSE["services"][gateway]["depends_on"] == {
            "migrate": {"condition": "service_completed_successfully"}
        }


@pytest.mark.parametrize("folder", ["docker", "kubernetes"])
def test_the_configurations_can_be_read_and_do_not_share_a_file(folder):
    config = read_config(DEPLOY / folder / "arbitrage.toml")
    assert config.gateway.database.startswith("postgresql://")
    assert config.gateway.drain
    assert config.gateway.host == "0.0.0.0"


def test_nothing_runs_as_root_or_writes_to_its_root():
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)
    for kind in ("Job", "Deployment"):
        context = pod(kind)["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 10001)
        inner = container(kind)["securityContext"]
        assert (inner["readOnlyRootFilesystem"], inner["allowPrivilegeEscalation"]) == (True, False)
        assert inner["capabilities"] == {"drop": ["ALL"]}
        assert not pod(kind)["automountServiceAccountToken"]
    for name in ("migrate", "gateway-1", "gateway-2", "pgbouncer"):
        service = COMPOSE["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    for line in ("DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes"):
        assert line in UNIT.splitlines()


def test_probes_ask_routes_that_exist_and_need_no_key():
    probes = container("Deployment")
    paths = {probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    paths |= set(re.findall(r"http://127\.0\.0\.1:8080(/[\w/]+)", " ".join(dockerfile("HEALTHCHECK"))))
    paths |= set(re.findall(r"health_uri (\S+)", (DEPLOY / "docker" / "Caddyfile").read_text()))
    assert paths == {"/health/live", "/health/ready"}
    assert paths <= set(schema()["paths"])
    assert probes["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert (
        probes["livenessProbe"]["httpGet"]["path"] == "/health/live"
    )  # a database that is away must not restart gateways


def test_there_is_time_to_drain_and_to_finish():
    settings = read_config(DEPLOY / "kubernetes" / "arbitrage.toml").gateway
    drain = settings.drain
    assert pod("Deployment")["terminationGracePeriodSeconds"] > drain + settings.grace
    probe = container("Deployment")["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < drain
    settings = read_config(DEPLOY / "docker" / "arbitrage.toml").gateway
    for gateway in ("gateway-1", "gateway-2"):
        patience = float(COMPOSE["services"][gateway]["stop_grace_period"].removesuffix("s"))
        assert patience > settings.drain + settings.grace
    assert float(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1]) > GatewayConfig().grace


def test_a_gateway_is_replaced_only_when_its_successor_is_ready():
    rolling = MANIFESTS["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
    assert MANIFESTS["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 2
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["Service"]["spec"]["selector"],
        MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()


def test_secrets_come_from_the_environment_and_none_is_in_a_file():
    wanted = {"ARBITRAGE_SECRET", FIRST_KEY, "DATABASE_PASSWORD", "OPENAI_API_KEY"}
    assert set(COMPOSE["services"]["gateway-1"]["environment"]) == wanted
    assert all(str(value).startswith("${") for value in COMPOSE["services"]["gateway-1"]["environment"].values())
    for kind in ("Job", "Deployment"):
        assert container(kind)["envFrom"] == [{"secretRef": {"name": "arbitrage"}}]
        assert "env" not in container(kind)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed: apt install systemd")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "arbitrage.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, "arbitrage.service" in done.stderr) == (0, False), done.stderr
