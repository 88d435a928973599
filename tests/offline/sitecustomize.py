"""Refuses connections to other machines; Python imports it when it starts, in every process that a test starts.

A refused address is written into the file that ATTNBENCH_TRIED names, so that the test fails whatever becomes of the
error.
"""

import ipaddress
import os
import socket
from typing import Any


def is_here(host: Any) -> bool:
    """True for this machine, by name or number."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def guarded(function: Any, is_method: bool) -> Any:
    """The function of the socket module, refused for hosts elsewhere."""

    def call(*arguments: Any, **options: Any) -> Any:
        host = options.get("host", arguments[0] if arguments else None)
        if is_method:
            # Of a socket: the address stands last, and for one of a file it is a path.
            address = arguments[-1]
            host = address[0] if isinstance(address, tuple) else None
        if not is_here(host):
            if "ATTNBENCH_TRIED" in os.environ:
                with open(os.environ["ATTNBENCH_TRIED"], "a", encoding="utf-8") as tried:
                    tried.write(f"{host}\n")
            raise socket.gaierror(f"{host}: no network in tests")
        return function(*arguments, **options)

    return call


for name in ("getaddrinfo", "gethostbyname"):
    setattr(socket, name, guarded(getattr(socket, name), is_method=False))
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, guarded(getattr(socket.socket, name), is_method=True))
