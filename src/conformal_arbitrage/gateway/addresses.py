"""Whose a connection is: the addresses of peers, and of those a proxy names.

Knows nothing of connections.
"""

import ipaddress
import re

_PORT = re.compile(r"(\d+(?:\.\d+){3}|\[.*\]):\d+")


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, without port or zone; None if the text is not one."""
    with_port = _PORT.fullmatch(host)
    bare = (with_port[1] if with_port else host).strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def group_of(host: str) -> str:
    """Return what counts as one address: a network of 64 bits for IPv6, since a peer usually has a whole one."""
    address = address_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host if address is None else str(address)
