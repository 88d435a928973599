"""Paths of the user and of our files."""

import os
import shutil
from pathlib import Path

from attnbench.settings.errors import UserError


def user_path(name: Path | str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name}: no home folder is known for ~; set HOME, or name the whole path") from None


def user_cache() -> Path:
    """Return the folder of files that can be made again, which may not exist."""
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "attnbench"


def unlinked(path: Path) -> Path:
    """Remove a symbolic or hard link or a FIFO at `path`, and return the path.

    The file behind a link, made by `cp -al` say, must not be written to; a FIFO would block the process.
    """
    if path.is_symlink() or path.is_fifo() or (path.is_file() and path.stat().st_nlink > 1):
        path.unlink()
    return path


def unlinked_log(path: Path) -> Path:
    """Do the same for a file to append to: it keeps its content, except behind a symbolic link."""
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        beside = name_beside(path)
        shutil.copyfile(path, beside)
        os.replace(beside, path)
    return unlinked(path)


def name_beside(path: Path) -> Path:
    """Return the path of this process's temporary file that replaces `path`."""
    return unlinked(path.with_name(f".{path.name}.{os.getpid()}.new"))
