"""Tokens of a corpus on disk, made once and memory-mapped, so that a text may be larger than memory.

    data/tokens/<corpus>-<tokenizer>-<key>/
      tokens.json                                   names, sizes, fingerprint and tokenizer; written last
      train.tokens validation.tokens test.tokens    ids, little-endian, of one, two or four bytes
      progress.json bpe.json                        until tokens.json is there: the same command resumes from them

`key` is a hash of the names, sizes and dates of the source's files and of the settings that decide what is made of
them. The folder may be removed at any time.
"""

import hashlib
import json
import logging
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from attnbench.data.bpe import from_state
from attnbench.data.tokenizer import Tokenizer
from attnbench.machine.locks import folder_lock
from attnbench.results.files import replace_file, sync
from attnbench.settings.errors import UserError
from attnbench.settings.paths import user_cache
from attnbench.settings.untrusted import read_object

log = logging.getLogger(__name__)

FORMAT = 3
"""Raised when equal files and settings give other tokens or another layout: 3 is without headers."""

INDEX = "tokens.json"
SAVED_BYTES = 2**25
"""Bytes of text between two saves of the progress."""


@dataclass(slots=True, kw_only=True)
class Split:
    num_tokens: int
    num_bytes: int
    """Bytes of its text in UTF-8."""
    num_characters: int
    num_unknown: int
    """Characters that the tokenizer does not know."""
    num_unknown_bytes: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, count_V: np.ndarray, num_bytes: int) -> "Split":
        return cls(
            num_tokens=int(count_V.sum()),
            num_bytes=num_bytes,
            num_characters=int(count_V @ tokenizer.num_characters_V),
            num_unknown=int(count_V[tokenizer.num_writable :].sum()),
            num_unknown_bytes=num_bytes - int(count_V @ tokenizer.num_bytes_V),
        )


@dataclass(slots=True, kw_only=True)
class Tokens:
    name: str
    origin: str
    """See `texts.Texts`."""
    fingerprint: str
    """12 hex digits of a hash over the names and texts of the splits."""
    tokenizer: Tokenizer
    ids: dict[str, np.ndarray]
    """Token ids of each split, (N,), of the tokenizer's dtype."""
    splits: dict[str, Split]
    train_count_V: np.ndarray
    """Occurrences of each id in the train split, (tokenizer.size,) int64."""
    mappings: list[mmap.mmap] = field(default_factory=list)
    """Files that `ids` are mapped from."""


def count_ids(ids: np.ndarray, size: int) -> np.ndarray:
    """(size,) int64, in parts: bincount takes eight bytes for each id that it counts."""
    parts = (ids[start : start + 2**20] for start in range(0, len(ids), 2**20))
    return sum((np.bincount(part, minlength=size) for part in parts), np.zeros(size, dtype=np.int64))


def _count_written(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    count_V = np.zeros(tokenizer.size, dtype=np.int64)
    # Read, not mapped: mapped pages would count as this process's memory.
    with path.open("rb") as file:
        while len(part := np.fromfile(file, tokenizer.dtype.newbyteorder("<"), 2**20)):
            count_V += count_ids(part, tokenizer.size)
    return count_V


def folder_of(root: Path, label: str, key: Mapping[str, Any], files: Iterable[Path]) -> Path:
    """Return the folder of the tokens of a corpus, which may not exist yet; `key` has the settings that decide what is
    made of the files."""
    stats = [(path.name, path.stat()) for path in files]
    content = {"format": FORMAT, **key, "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    called = re.sub(r"[^\w.+-]+", "-", label).strip(".-")[:40] or "text"
    return kept_path(root, f"tokens/{called}-{key['tokenizer']}-{digest}")


def kept_path(root: Path, name: str) -> Path:
    """In `root`/data or, if this user may not write there, in the user's cache."""
    path = root / "data" / name
    nearest = next(folder for folder in path.parents if folder.exists())
    if path.exists() or os.access(nearest, os.W_OK):
        return path
    cache = user_cache() / name
    log.info(f"{nearest}: this user may not write there; {name} is kept in {cache.parent}")
    return cache


def is_made(folder: Path) -> bool:
    return (folder / INDEX).exists()


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make the folder and lock it; another process that makes the same tokens waits. Empty folders do not stay."""
    made = [path for path in (folder, *folder.parents[:2]) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, waits=True):
            yield
    except BaseException as error:
        # Up to the first that is not empty.
        with suppress(OSError):
            for path in made:
                path.rmdir()
        if not isinstance(error, OSError):
            raise
        where = error.filename2 or error.filename or folder
        raise UserError(
            f"{where}: {error.strerror or error}; tokens are kept in data/tokens, which may be a link to another disk: "
            "once that is mended, the same command resumes from what is there"
        ) from error


def make(
    folder: Path,
    splits: Iterable[tuple[str, Iterator[bytes]]],
    num_bytes: Mapping[str, int],
    tokenizer: Tokenizer,
    name: str,
    origin: str,
    fingerprint: Callable[[], str],
) -> None:
    """Write the tokens of a corpus, or the rest of them, inside `making`.

    Args:
        splits: the text of each; all of it is read, in order.
        num_bytes: of each.
        fingerprint: of the texts, known once all have been read.
    """
    saved = folder / "progress.json"
    progress = read_made(saved) if saved.exists() else {}
    interval = 0.1 if sys.stderr.isatty() else 30
    shape: dict[str, Any] = {"unit": "B", "unit_scale": True, "ncols": 79, "leave": False, "delay": 1}
    with tqdm(total=sum(num_bytes.values()), desc=f"tokens of {name}"[:30], mininterval=interval, **shape) as bar:
        for split, pieces in splits:
            num_read = _append(folder, split, pieces, tokenizer, progress, bar)
            if num_read != num_bytes[split]:
                raise UserError(f"{origin}: changed while it was read; the same command reads it anew")
    sizes, train_count_V = {}, np.zeros(0, dtype=np.int64)
    for split in num_bytes:
        count_V = _count_written(folder / f"{split}.tokens", tokenizer)
        sizes[split] = asdict(Split.of(tokenizer, count_V, num_bytes[split]))
        train_count_V = count_V if split == "train" else train_count_V
    content = {"format": FORMAT, "name": name, "origin": origin, "fingerprint": fingerprint(), "splits": sizes}
    content |= {"tokenizer": tokenizer.state(), "train_counts": train_count_V.tolist()}
    replace_file(folder / INDEX, json.dumps(content) + "\n")
    sync(folder)
    for path in (saved, folder / "bpe.json"):
        path.unlink(missing_ok=True)


def _append(
    folder: Path, split: str, pieces: Iterable[bytes], tokenizer: Tokenizer, progress: dict[str, Any], bar: Any
) -> int:
    """Write the tokens of a split from where they were cut off; return the bytes of its text."""
    done = progress.setdefault(split, {"num_bytes": 0, "num_tokens": 0})
    num_bytes, num_tokens = done["num_bytes"], done["num_tokens"]
    bar.update(num_bytes)
    path = folder / f"{split}.tokens"
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
        end = num_tokens * tokenizer.dtype.itemsize
        if file.seek(0, os.SEEK_END) < end:
            raise UserError(f"{path}: was cut off; remove {folder}, the same command makes it anew")
        # What was written after the last save goes.
        file.truncate(end)
        file.seek(end)
        for chunk in tokenizer.chunks(_behind(pieces, num_bytes)):
            num_tokens += _write_tokens(file, tokenizer, chunk)
            num_bytes += len(chunk)
            bar.update(len(chunk))
            if num_bytes - done["num_bytes"] >= SAVED_BYTES:
                _save(folder, file, progress, split, num_bytes, num_tokens)
                done = progress[split]
        _save(folder, file, progress, split, num_bytes, num_tokens)
    return num_bytes


def _behind(pieces: Iterable[bytes], num_bytes: int) -> Iterator[bytes]:
    for piece in pieces:
        skipped = min(num_bytes, len(piece))
        num_bytes -= skipped
        if skipped < len(piece):
            yield piece[skipped:]


def _write_tokens(file: BinaryIO, tokenizer: Tokenizer, text: bytes) -> int:
    ids = tokenizer.encode_utf8(text)
    file.write(ids.astype(tokenizer.dtype.newbyteorder("<"), copy=False).tobytes())
    return len(ids)


def _save(folder: Path, file: BinaryIO, progress: dict[str, Any], split: str, num_bytes: int, num_tokens: int) -> None:
    file.flush()
    os.fsync(file.fileno())
    progress[split] = {"num_bytes": num_bytes, "num_tokens": num_tokens}
    replace_file(folder / "progress.json", json.dumps(progress) + "\n")


def read_made(path: Path) -> dict[str, Any]:
    """An error names the folder to remove."""
    try:
        return read_object(path)
    except UserError as error:
        raise UserError(f"{error}; remove {path.parent}, the same command makes it anew") from None


def opened(folder: Path) -> Tokens:
    content = read_made(folder / INDEX)
    ids, mappings = {}, []
    try:
        tokenizer = from_state(content["tokenizer"])
        splits = {split: Split(**sizes) for split, sizes in content["splits"].items()}
        for split, sizes in splits.items():
            ids[split], mapping = _mapped(folder, split, tokenizer, sizes.num_tokens)
            mappings += [mapping] if mapping is not None else []
        return Tokens(
            name=content["name"],
            origin=content["origin"],
            fingerprint=content["fingerprint"],
            tokenizer=tokenizer,
            ids=ids,
            splits=splits,
            train_count_V=np.array(content["train_counts"], dtype=np.int64),
            mappings=mappings,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder}: its tokens cannot be read ({error}); remove it, the same command makes it anew"
        ) from None


def _mapped(folder: Path, split: str, tokenizer: Tokenizer, num_tokens: int) -> tuple[np.ndarray, mmap.mmap | None]:
    """Pages are read when they are used, and given up when memory is short."""
    dtype = tokenizer.dtype.newbyteorder("<")
    with (folder / f"{split}.tokens").open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != num_tokens * dtype.itemsize:
            raise ValueError(f"{split}.tokens has {size} bytes, {num_tokens} tokens need {num_tokens * dtype.itemsize}")
        if not size:
            return np.empty(0, dtype), None
        # Copied on writing, which nothing does: torch warns of memory that cannot be written.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(mapping, dtype), mapping
