"""Folder of a run or a cell:

config.yaml environment.json train.log metrics.jsonl checkpoint/ results/<evaluation>-<hash>.jsonl failed.txt
"""

import errno
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from attnbench.machine.environment import environment, environment_id, is_checkout
from attnbench.machine.locks import folder_lock
from attnbench.machine.signals import interruptible
from attnbench.results.files import half_replaced, replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.escape import OneLine
from attnbench.settings.paths import unlinked_log
from attnbench.settings.untrusted import MAX_JSON_BYTES, parse_json, read_bounded

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed package."""


def data_root() -> Path:
    """The folder whose data/ has corpora: the checkout or, without one, the current folder."""
    return ROOT if is_checkout(ROOT) else Path.cwd()


IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)
"""Errors of a folder or link in place of a file, or of a file in place of a folder."""


@contextmanager
def holding(folder: Path, *, waits: bool) -> Iterator[None]:
    """Make the folder and lock it against other processes of attnbench; see `locks.folder_lock`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"outputs_dir: {error.filename} cannot be made ({error.strerror}); outputs_dir=FOLDER names another"
        ) from error
    try:
        with folder_lock(folder, waits=waits):
            # Left by a killed process.
            for stale in half_replaced(folder):
                stale.unlink()
            yield
    except OSError as error:
        # A failed renaming names the file second.
        where = error.filename2 or error.filename or folder
        raise UserError(f"{where}: {error.strerror or error}; {_way_out(error)}") from error


def _way_out(error: OSError) -> str:
    if error.errno in IN_THE_WAY:
        return "rename or remove it; the same command then resumes"
    if error.errno == errno.ENOENT:
        return "it is gone: the same command starts again with what is left"
    return "earlier results are kept; once that is mended, the same command resumes from them"


@contextmanager
def recording(folder: Path, *, waits: bool) -> Iterator[None]:
    """Hold the folder; write its train.log, and its failed.txt after an error. Raises Interrupted after a signal that
    was not handled inside."""
    with recording_each([folder], waits=waits, is_done=lambda folder: False):
        yield


@contextmanager
def recording_each(folders: Sequence[Path], *, waits: bool, is_done: Callable[[Path], bool]) -> Iterator[None]:
    """Hold several folders as `recording` does; `is_done` tells if the work of a folder was finished before an
    error."""
    with ExitStack() as held:
        # Sorted, so that two processes do not wait for each other.
        for folder in sorted(folders):
            held.enter_context(holding(folder, waits=waits))
        with ExitStack() as stack:
            for folder in folders:
                _keep_log(folder / "train.log", stack)
            try:
                with interruptible("interrupted; the same command resumes from what was kept"):
                    yield
            except Exception as error:
                # Suppressed: the folder may be the failure.
                for folder in folders:
                    if not is_done(folder):
                        with suppress(OSError):
                            replace_file(folder / "failed.txt", f"{type(error).__name__}: {error}\n")
                raise
        for folder in folders:
            (folder / "failed.txt").unlink(missing_ok=True)


class _LogFile(logging.FileHandler):
    """Ignores a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _keep_log(path: Path, stack: ExitStack) -> None:
    handler = _LogFile(unlinked_log(path), encoding="utf-8")
    handler.setFormatter(OneLine("%(asctime)s %(message)s"))
    logger = logging.getLogger("attnbench")
    stack.callback(logger.setLevel, logger.level)
    # The file has these lines even if the terminal does not show them.
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    logger.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(logger.removeHandler, handler)


def config_text(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def write_config(folder: Path, content: dict[str, Any]) -> None:
    replace_file(folder / "config.yaml", config_text(content))


def first_environment(folder: Path) -> dict[str, Any]:
    path = folder / "environment.json"
    try:
        stamp = parse_json(read_bounded(path, MAX_JSON_BYTES))
        if not isinstance(stamp, dict) or not {"device", "commit", "dirty"} <= stamp.keys():
            raise ValueError("no environment")
    except (OSError, ValueError) as error:
        reason = f"does not say where the training ran ({error}), so its rows cannot be made again"
        raise UserError(f"{path}: {reason}; rerun=true trains again") from None
    return stamp


def stamp_environment(folder: Path, device: torch.device) -> dict[str, Any]:
    """environment.json is that of the first sitting; another one has a file of its own, named by its id."""
    stamp = environment(device, ROOT)
    text, first = json.dumps(stamp, indent=2) + "\n", folder / "environment.json"
    is_first = not first.exists() or read_bounded(first, MAX_JSON_BYTES) == text
    path = first if is_first else folder / f"environment-{environment_id(stamp)}.json"
    replace_file(path, text)
    return stamp
