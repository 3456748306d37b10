"""No test reaches the outside network: any connection or lookup beyond loopback is an error, in child processes too."""

import sys

_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def _guard(event, args):
    if event == "socket.connect":
        address = args[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event == "socket.getaddrinfo":
        host = args[0]
    else:
        return
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if isinstance(host, str) and host and not host.startswith(_LOOPBACK):
        raise AssertionError(f"a test tried to reach {host}")


sys.addaudithook(_guard)
