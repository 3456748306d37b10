"""A real server of Spark Connect in a process of its own: the commands, and what is said when server or workers fail.

`make engines` runs it; each server takes ten seconds to start.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformal_arbitrage import SparkTable, calibrate
from tests.calibration.test_parts import some_log, told, write_parts

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif("ENGINE_ROUNDS" not in os.environ, reason="make engines runs it"),
    pytest.mark.skipif(find_spec("grpc") is None, reason="pyspark[connect] is not installed: pip install '.[spark]'"),
    pytest.mark.skipif(
        shutil.which("java") is None, reason="there is no Java for Spark: apt install default-jre-headless"
    ),
]


class ConnectServer:
    """A server of this machine; its workers have the tests, and this package only if it is sent to them."""

    def __init__(self, folder, python):
        import pyspark

        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"sc://127.0.0.1:{self.port}"
        settings = {
            "spark.ui.enabled": "false",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
        }
        words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        script = Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh"
        own = {"SPARK_LOG_DIR": str(folder), "SPARK_PID_DIR": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}
        with (folder / "server.txt").open("w") as output:
            self.process = subprocess.Popen(
                [str(script), "--wait", "--master", "local[2]", *words],
                env={**os.environ, **own, "PYSPARK_PYTHON": str(python), "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def answers(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 5).close()
        except OSError:
            return False
        return True

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def connect_server(folder, python=sys.executable):
    folder.mkdir()
    server = ConnectServer(folder, python)
    try:
        deadline = time.monotonic() + 300
        while not server.answers():
            assert time.monotonic() < deadline, (folder / "server.txt").read_text()[-2000:]
            assert server.process.poll() is None, (folder / "server.txt").read_text()[-2000:]
            time.sleep(0.2)
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def scores(tmp_path):
    return write_parts(replace(some_log(300), identities=None), tmp_path / "scores", [100, 200])


def arbitrage(*words):
    """Run the command; return its status and what it wrote."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ran = subprocess.run(
        [sys.executable, "-m", "conformal_arbitrage", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr


class ServerKiller:
    """Work that kills the server whose worker does it."""

    def __init__(self, group):
        self.group = group

    def __call__(self, part):
        os.killpg(self.group, signal.SIGKILL)


def test_commands_use_a_server_and_say_so_in_a_line_when_it_dies(tmp_path, scores):
    certificate, log = tmp_path / "c.json", f"table:parquet.`{scores}`"
    expected = calibrate(some_log(300), "0.2")
    with connect_server(tmp_path / "server") as server:
        engine = ("--engine", server.address)
        status, out, err = arbitrage("calibrate", log, "--alpha", "0.2", "-o", certificate, "--json", *engine)
        assert (status, "Warning" in err) == (0, False), err
        assert json.loads(out)["rule"]["relaxation"] == expected.relaxation
        for words in ((log, *engine), (scores,)):
            status, out, err = arbitrage("verify", certificate, *words)
            assert (status, "nothing differs" in out) == (0, True), err
        group = server.process.pid
        table = SparkTable.open(server.address, f"parquet.`{scores}`")
        assert len(table) == 300
        message = told(lambda: list(table.run(ServerKiller(group), [])))
        assert message.startswith("EngineError: Spark gave up ("), message
        assert message.endswith("; the server no longer answers; see that it runs, and repeat the command"), message
        status, _, err = arbitrage("calibrate", log, "--alpha", "0.2", *engine)
        assert status == 2
        assert f"engine {server.address}: nothing answers at 127.0.0.1" in err
        table.frame.sparkSession.client.close()


def failing(tmp_path, scores, python):
    """Return what a command says whose workers run another Python."""
    with connect_server(tmp_path / "server", python) as server:
        log = f"table:parquet.`{scores}`"
        status, _, err = arbitrage("calibrate", log, "--alpha", "0.2", "--engine", server.address)
    assert status == 2, err
    assert len(err.strip().splitlines()) == 1, err
    return err


def test_workers_without_a_package_are_told_what_to_install(tmp_path, scores):
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\")\n")
    python = tmp_path / "python"
    path = f"{tmp_path / 'lacking'}:$PYTHONPATH"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    message = failing(tmp_path, scores, python)
    assert "No module named 'msgspec'" in message
    assert "needs numpy, msgspec and pyarrow" in message


def test_workers_of_another_version_of_python_are_named(tmp_path, scores):
    names = [f"python3.{minor}" for minor in (13, 12, 11) if minor != sys.version_info.minor]
    other = next((path for path in map(shutil.which, names) if path is not None and _runs(path)), None)
    if other is None:
        pytest.skip("there is no other Python")
    message = failing(tmp_path, scores, other)
    assert "the same minor version of Python" in message


def _runs(path):
    return subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
