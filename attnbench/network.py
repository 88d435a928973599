"""Whether a server can be reached, answered within a fixed time and without asking the server anything."""

import netrc
import os
import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def first_hop(url: str) -> tuple[str, int]:
    """Host and port that a request for `url` connects to: the server's, or those of the proxy that stands before it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        return host, port
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def can_connect(host: str, port: int, limit_seconds: float) -> bool:
    """Whether host:port takes a connection within the limit, the look-up of its name included."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=limit_seconds).close()
        except (OSError, UnicodeError):
            # A host that does not exist, does not answer, or whose name is none: not connected, whatever the cause.
            return
        connected.set()

    # Looking up a name knows no timeout and can take minutes, so a thread that nobody waits for does it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return connected.is_set()


def has_netrc_key(host: str) -> bool:
    """Whether the user's netrc file (NETRC, ~/.netrc or ~/_netrc, the first there is) holds a password for `host`."""
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in [Path(place).expanduser() for place in places]:
        if path.exists():
            try:
                entry = netrc.netrc(path).authenticators(host)
            except (netrc.NetrcParseError, OSError):
                # A file that nobody can read logs nobody in.
                return False
            return entry is not None and bool(entry[2])
    return False
