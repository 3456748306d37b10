import socket
import subprocess
import sys

import pytest


def test_the_outside_network_is_out_of_reach():
    with pytest.raises(AssertionError, match="tried to reach"):
        socket.create_connection(("192.0.2.1", 80), timeout=0.1)
    with pytest.raises(AssertionError, match=r"tried to reach example\.org"):
        socket.getaddrinfo("example.org", 80)


def test_child_processes_cannot_reach_it_either():
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=0.1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "tried to reach 192.0.2.1" in done.stderr
