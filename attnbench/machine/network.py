"""Whether a server can be reached and the user is known to it, found out within a fixed time."""

import netrc
import os
import ssl
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path


def answers(url: str, limit_seconds: float) -> bool:
    """Whether anything answers a request for `url` within the limit, the look-up of its name included.

    Goes through the proxy that the environment names, as the real request would.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=limit_seconds).close()
        except urllib.error.HTTPError as error:
            # An error of the server is an answer too.
            error.close()
        except urllib.error.URLError as error:
            # A certificate that Python does not know may still be known to the program that will do the work.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except (OSError, ValueError, HTTPException):
            return
        answered.set()

    # Looking up a name knows no timeout and can take minutes, so a thread that nobody waits for does it.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answered.is_set()


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
