"""Tests ask nothing of the network: whoever tries fails, in the tests' process and in those that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRIED = Path(os.environ["ATTNBENCH_TRIED"])
ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737)."""
CONNECTS = f"import socket; socket.create_connection(('{ELSEWHERE}', 80), timeout=1)"
LOOKS_UP = "import urllib.request; urllib.request.urlopen('https://huggingface.co', timeout=1)"


@pytest.mark.parametrize(("code", "host"), [(CONNECTS, ELSEWHERE), (LOOKS_UP, "huggingface.co")])
@pytest.mark.parametrize("is_child", [False, True])
def test_a_connection_elsewhere_is_refused_and_kept(code, host, is_child):
    if is_child:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"{host}: no network in tests" in done.stderr
    else:
        with pytest.raises(OSError, match="no network in tests"):
            exec(code)
    assert TRIED.read_text() == f"{host}\n"
    TRIED.write_text("")
