"""Names of checkpoints and of their files, and the removal of a checkpoint, without torch for attnbench runs."""

import re
from pathlib import Path

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
NEEDED = ("config.json", WEIGHTS)
FILES = re.compile(rf"{'|'.join(map(re.escape, (*NEEDED, OPTIMIZER, 'state.json')))}|\.tmp[0-9A-Za-z]{{6}}")
"""Files of a checkpoint, and those that safetensors is still writing."""

STEP, BEST = "step", "best"
NUMBER = r"([0-9]{8}|[1-9][0-9]{8,})"
"""The step in the name of a checkpoint."""
WHOLE = rf"(final|({STEP}|{BEST})-{NUMBER})"
UNFINISHED = re.compile(rf"\.{WHOLE}\.(partial|removed)")
"""Names of a checkpoint while it is written, and while it is removed."""


def is_own_file(path: Path) -> bool:
    """Tell if attnbench gives this name to a file of a checkpoint."""
    return FILES.fullmatch(path.name) is not None and (path.is_symlink() or not path.is_dir())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's own files; a link alone, not the folder that it leads to.

    The folder gets another name first, so that one under its name is whole. It keeps the other name if files of the
    user's are in it.
    """
    hidden = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.removed")
    if hidden != folder:
        folder.rename(hidden)
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink()
        return
    for path in filter(is_own_file, sorted(hidden.iterdir())):
        path.unlink()
    if not any(hidden.iterdir()):
        hidden.rmdir()
