import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def url():
    command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    yield server.stdout.readline().strip() + "/v1"
    server.stdin.close()
    server.wait(30)
    server.stdout.close()
