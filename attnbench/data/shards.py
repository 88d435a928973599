"""Tokens of a corpus on disk, made once: a file a split, memory-mapped, so that a text may be larger than memory.

    data/tokens/<corpus>-<tokenizer>-<key>/
      tokens.json          names, sizes and fingerprints, and the tokenizer; written last
      train.tokens         a header of HEADER_BYTES, then the ids, little-endian, of one, two or four bytes each
      validation.tokens test.tokens
      *.partial progress.json bpe.json    while it is made: the same command goes on from there

`key` is a hash of the names, sizes and dates of the source's files and of the settings that say what is made of them.
The folder may be removed at any time.
"""

import hashlib
import json
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attnbench.data.progress import Progress
from attnbench.data.tokenizer import Tokenizer
from attnbench.data.tokenizer_state import from_state
from attnbench.machine.locks import folder_lock
from attnbench.results.files import replace_file, sync
from attnbench.settings.errors import UserError
from attnbench.settings.text import open_regular, read_object, user_path

log = logging.getLogger(__name__)

FORMAT = 2
"""Raised where the tokens of equal files and settings change: 2 is without byte order marks."""

INDEX = "tokens.json"
HEADER_BYTES = 4096
SAVED_BYTES = 2**25
"""Bytes of text between two times that the progress is saved."""


@dataclass(slots=True, kw_only=True)
class Split:
    """Sizes of a split."""

    num_tokens: int
    num_bytes: int
    """Bytes of its text in UTF-8."""
    num_characters: int
    num_unknown: int
    """Characters that the tokenizer does not know."""
    num_unknown_bytes: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, count_V: np.ndarray, num_bytes: int) -> "Split":
        """Sum up the counts of the ids of a text of so many bytes."""
        return cls(
            num_tokens=int(count_V.sum()),
            num_bytes=num_bytes,
            num_characters=int(count_V @ tokenizer.num_characters_V),
            num_unknown=int(count_V[tokenizer.num_writable :].sum()),
            num_unknown_bytes=num_bytes - int(count_V @ tokenizer.num_bytes_V),
        )


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Corpus as tokens."""

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
    """How often each id is in the train split, (tokenizer.size,) int64."""
    mappings: list[mmap.mmap] = field(default_factory=list)
    """Files that `ids` are mapped from."""


def count_ids(ids: np.ndarray, size: int) -> np.ndarray:
    """Return how often each of `size` ids is there, (size,) int64, without eight bytes for each that is counted."""
    parts = (ids[start : start + 2**20] for start in range(0, len(ids), 2**20))
    return sum((np.bincount(part, minlength=size) for part in parts), np.zeros(size, dtype=np.int64))


def folder_of(root: Path, label: str, key: Mapping[str, Any], files: Iterable[Path]) -> Path:
    """Return the folder of the tokens of a corpus, which need not be there.

    Args:
        key: the settings that say what is made of the files.
    """
    stats = [(path.name, path.stat()) for path in files]
    content = {"format": FORMAT, **key, "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    called = re.sub(r"[^\w.+-]+", "-", label).strip(".-")[:40] or "text"
    return kept_path(root, f"tokens/{called}-{key['tokenizer']}-{digest}")


def kept_path(root: Path, name: str) -> Path:
    """Return the path in data/ of what is made of a corpus; for a user who may not write there, in a cache of theirs.

    Args:
        root: the folder of data/.
    """
    path = root / "data" / name
    nearest = next(folder for folder in path.parents if folder.exists())
    if path.exists() or os.access(nearest, os.W_OK):
        return path
    cache = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "attnbench" / name
    log.info(f"{nearest}: this user may not write there; {name} is kept in {cache.parent}")
    return cache


def is_made(folder: Path) -> bool:
    """Return whether all tokens are there."""
    return (folder / INDEX).exists()


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it while its tokens are made; another process that makes the same is waited for.

    What fails before anything is written, as a tokenizer of too many symbols does, leaves no folder.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
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
            "once that is mended, the same command goes on from what is there"
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
    """Write the tokens of a corpus, inside `making`, or the rest of them.

    Args:
        splits: the text of each, all of which is read in order.
        num_bytes: of each.
        fingerprint: that of the texts, known when all have been read.
    """
    progress = _saved(folder, num_bytes)
    made: dict[str, Any] = {}
    count_V = np.zeros(0, dtype=np.int64)
    with Progress(sum(num_bytes.values()), f"tokens of {name}") as shown:
        for split, pieces in splits:
            with _Shard(folder, split, tokenizer, progress) as shard:
                for chunk in tokenizer.chunks(shard.passed(pieces, shown)):
                    shard.add(chunk)
                    shown.add(len(chunk))
            if shard.num_bytes != num_bytes[split]:
                raise UserError(f"{origin}: changed while it was read; the same command reads it anew")
            made[split] = asdict(Split.of(tokenizer, shard.count_V, num_bytes[split]))
            made[split] |= {"sha256": shard.digest.hexdigest()}
            count_V = shard.count_V if split == "train" else count_V
    for split, sizes in made.items():
        header = header_of(split, tokenizer, fingerprint(), sizes["num_tokens"])
        path = folder / f"{split}.tokens"
        partial = _partial(path)
        with partial.open("r+b") as file:
            file.write(header)
        sync(partial)
        partial.rename(path)
        sizes |= dict(zip(("size", "mtime_ns"), _stat(path), strict=True))
    content = {"format": FORMAT, "name": name, "origin": origin, "fingerprint": fingerprint(), "splits": made}
    content |= {"tokenizer": tokenizer.state(), "train_counts": count_V.tolist()}
    replace_file(folder / INDEX, json.dumps(content) + "\n")
    sync(folder)
    for path in (folder / "progress.json", folder / "bpe.json"):
        path.unlink(missing_ok=True)


class _Shard:
    """File of a split that is being written, from where it was cut off."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, progress: dict[str, Any]) -> None:
        self.folder, self.split, self.tokenizer, self.progress = folder, split, tokenizer, progress
        saved = progress.get(split, {})
        self.num_bytes, self.num_tokens = saved.get("num_bytes", 0), saved.get("num_tokens", 0)
        self.num_saved_bytes = self.num_bytes
        self.count_V = np.zeros(tokenizer.size, dtype=np.int64)
        self.digest = hashlib.sha256()
        path = _partial(folder / f"{split}.tokens")
        if not path.exists() and (folder / f"{split}.tokens").exists():
            # It was complete, and the others were not.
            (folder / f"{split}.tokens").rename(path)
        self.file: BinaryIO = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")  # noqa: SIM115
        if not self._reads_back() or (saved and saved["sha256"] != self._checksum()):
            log.warning(f"{path}: it or progress.json was altered since it was written; it is made anew")
            self.num_bytes = self.num_tokens = self.num_saved_bytes = 0
            self.count_V[:], self.digest = 0, hashlib.sha256()
        end = HEADER_BYTES + self.num_tokens * tokenizer.dtype.itemsize
        self.file.truncate(end)
        self.file.seek(end)

    def _checksum(self) -> str:
        """Return the checksum of the tokens and of the length of their text, where the same command goes on."""
        digest = self.digest.copy()
        digest.update(f" {self.num_bytes}".encode())
        return digest.hexdigest()

    def _reads_back(self) -> bool:
        """Count and hash the saved tokens; return False where some are missing or unknown to the tokenizer."""
        self.file.seek(HEADER_BYTES)
        left = self.num_tokens * self.tokenizer.dtype.itemsize
        while left:
            block = self.file.read(min(left, 2**20))
            if not block:
                return False
            left -= len(block)
            self.digest.update(block)
            ids = np.frombuffer(block, self.tokenizer.dtype)
            if int(ids.max()) >= self.tokenizer.size:
                return False
            self.count_V += np.bincount(ids, minlength=self.tokenizer.size)
        return True

    def passed(self, pieces: Iterable[bytes], shown: Progress) -> Iterator[bytes]:
        """Pass on the text whose tokens are not there yet."""
        todo = self.num_bytes
        shown.start(todo)
        for piece in pieces:
            done = min(todo, len(piece))
            todo -= done
            if done < len(piece):
                yield piece[done:]

    def add(self, text: bytes) -> None:
        """Write the tokens of a text, and from time to time how far that is."""
        ids = self.tokenizer.encode_utf8(text)
        self.count_V += np.bincount(ids, minlength=self.tokenizer.size)
        content = ids.astype(self.tokenizer.dtype.newbyteorder("<"), copy=False).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.num_bytes, self.num_tokens = self.num_bytes + len(text), self.num_tokens + len(ids)
        if self.num_bytes - self.num_saved_bytes >= SAVED_BYTES:
            self.save()

    def save(self) -> None:
        """Note how far it is, once that is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.num_saved_bytes = self.num_bytes
        sizes = {"num_bytes": self.num_bytes, "num_tokens": self.num_tokens, "sha256": self._checksum()}
        self.progress[self.split] = sizes
        replace_file(self.folder / "progress.json", json.dumps(self.progress) + "\n")

    def __enter__(self) -> "_Shard":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self.save()
        finally:
            self.file.close()


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def read_made(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a folder of tokens.

    Raises:
        UserError: it cannot be read, or holds none; the message names the folder to remove.
    """
    try:
        return read_object(path)
    except UserError as error:
        raise UserError(f"{error}; remove {path.parent}, the same command makes it anew") from None


def _saved(folder: Path, num_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Read how far a preparation came; an empty dictionary before the first save.

    Raises:
        UserError: the file was altered into something else.
    """
    path = folder / "progress.json"
    if not path.exists():
        return {}
    progress = read_made(path)
    for split, sizes in progress.items():
        kinds = {"num_bytes": int, "num_tokens": int, "sha256": str}
        are_typed = isinstance(sizes, dict) and all(type(sizes.get(name)) is kind for name, kind in kinds.items())
        if split not in num_bytes or not are_typed or min(sizes["num_bytes"], sizes["num_tokens"]) < 0:
            raise UserError(f"{path}: was altered; remove {folder}, the same command makes it anew")
    return progress


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def header_of(split: str, tokenizer: Tokenizer, fingerprint: str, num_tokens: int) -> bytes:
    """Return the first HEADER_BYTES of a shard: a line of JSON, and spaces."""
    content = {
        "attnbench_tokens": FORMAT,
        "split": split,
        "dtype": tokenizer.dtype.name,
        "num_tokens": num_tokens,
        "source": fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    return json.dumps(content).encode().ljust(HEADER_BYTES - 1) + b"\n"


def opened(folder: Path) -> Tokens:
    """Open the tokens in a folder; a shard whose date is not as it was written is read and compared.

    Raises:
        UserError: the folder's files are torn, altered, or another corpus's.
    """
    path = folder / INDEX
    content = read_made(path)
    anew = f"remove {folder}, the same command makes it anew"
    try:
        tokenizer, fingerprint = from_state(content["tokenizer"]), content["fingerprint"]
        counts = np.array(content["train_counts"], dtype=np.int64)
        ids, splits, mappings = {}, {}, []
        for split, sizes in content["splits"].items():
            kept = {name: int(sizes[name]) for name in Split.__dataclass_fields__}
            splits[split] = Split(**kept)
            mapping = _mapped(folder / f"{split}.tokens", split, tokenizer, fingerprint, sizes)
            ids[split] = np.frombuffer(mapping, tokenizer.dtype.newbyteorder("<"), offset=HEADER_BYTES)
            mappings.append(mapping)
        if content["format"] != FORMAT or [*ids] != ["train", "validation", "test"] or len(counts) != tokenizer.size:
            raise ValueError("it is of another version of attnbench")
        names = {name: str(content[name]) for name in ("name", "origin")}
        made = {"tokenizer": tokenizer, "ids": ids, "splits": splits, "train_count_V": counts, "mappings": mappings}
        return Tokens(**names, fingerprint=fingerprint, **made)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: missing; {anew}") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}; {anew}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: does not fit its folder ({error}); {anew}") from None


def _mapped(path: Path, split: str, tokenizer: Tokenizer, fingerprint: str, sizes: Mapping[str, Any]) -> mmap.mmap:
    """Map a shard into memory: pages are read when they are used, and given up when memory is short."""
    num_tokens, dtype = sizes["num_tokens"], tokenizer.dtype.newbyteorder("<")
    with open_regular(path) as file:
        if file.read(HEADER_BYTES) != header_of(split, tokenizer, fingerprint, num_tokens):
            raise ValueError(f"{path.name} is of another text, tokenizer or split, by its header")
        size, date = _stat(path)
        if size != HEADER_BYTES + num_tokens * dtype.itemsize:
            raise ValueError(f"{path.name} is torn: it has {size} bytes")
        if (size, date) != (sizes["size"], sizes["mtime_ns"]):
            digest = hashlib.sha256()
            while block := file.read(2**20):
                digest.update(block)
            if digest.hexdigest() != sizes["sha256"]:
                raise ValueError(f"{path.name} was altered after it was written")
        # Copied on writing, which nothing does: torch warns of memory that cannot be written.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
