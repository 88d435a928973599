"""Functions for workers in tests; imports little, because every worker imports this file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve


def act(item: tuple[str, str]) -> None:
    what, where = item
    if what == "mark":
        (Path(where) / f"{os.getpid()}-{time.monotonic_ns()}").touch()
    elif what == "say":
        print(f"{where} on standard output")
        print(f"{where} on standard error", file=sys.stderr)
    elif what == "refuse":
        raise UserError(f"{where}: cannot be\nand more")
    elif what == "raise":
        raise ValueError(f"{where}\nand more")
    elif what == "leave":
        os._exit(int(where))
    elif what == "exit":
        sys.exit(int(where))
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "wait":
        time.sleep(float(where))
    elif what == "hold":
        from attnbench.machine.locks import folder_lock

        with folder_lock(Path(where), waits=True):
            pass
    elif what == "see":
        # The GPUs that it may use, kept in a file named after it; slowly, so that no worker gets two.
        time.sleep(0.5)
        (Path(where) / f"{os.getpid()}-{time.monotonic_ns()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    elif what == "resolve":
        resolve(where, object)
    elif what == "stay":
        save_when_stopped(Path(where))


def save_when_stopped(folder: Path) -> None:
    """Until a signal; then as a training does: it saves, which takes a moment, and goes."""

    def stop(number: int, frame: object) -> None:
        time.sleep(0.3)
        (folder / "saved").touch()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # What it has started itself must not be left behind either.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / f"pid-{child.pid}").touch()
    (folder / f"pid-{os.getpid()}").touch()
    time.sleep(600)
