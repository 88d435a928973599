"""Texts from .txt and parquet files, and from the documentation in every CPython. Without torch."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from attnbench.data.pieces import PIECE_BYTES, Text, is_blank, joined, read_utf8, whole_characters
from attnbench.data.shards import kept_path
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import open_regular

SPLITS = ("train", "validation", "test")
MAX_TEXT_BYTES = 64 * 2**30
"""Largest text of one file, decompressed."""

MAX_FOOTER_BYTES, MAX_FOOTER_ENTRIES = 2**22, 2**20
"""Largest text and list in a parquet file's metadata: no memory is allocated for larger ones."""

ROWS_AT_A_TIME = 256

WINDOW_CHARACTERS = 128
"""Length from which every passage of the embedded corpus is unique: no split quotes another."""

RENAME = "rename the one that holds the text"

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Words for a split in file names, in any case."""

SPLIT_WORD = re.compile(
    rf"(?<![a-z])(?:{'|'.join(SPLIT_WORDS)}|eval|evaluation|(?:held|hold)[-_. ]?out)"
    r"(?:s|sets?|data|texts?|splits?)?(?![a-z])"
)
"""A word about a split; some cannot be assigned: `eval` may be validation or test."""

SPLIT_NAME = re.compile(
    rf"(?P<prefix>.*[-_. ])?(?P<word>{'|'.join(SPLIT_WORDS)})"
    r"(?:[-_. ](?P<part>\d+)[-_. ]of[-_. ](?P<total>\d+)(?:[-_. ][0-9a-f]{8,})?)?"
)
"""Stem of a split's file, in small letters: train, wiki.train, train-00000-of-00002-0123456789abcdef."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Texts:
    """Corpus before it becomes tokens."""

    name: str
    """Name in rows and tables."""
    origin: str
    """File or folder, for error messages."""
    splits: dict[str, Text]
    """Text of each split, in the order of SPLITS."""


@dataclass(slots=True, kw_only=True, frozen=True)
class CorpusSource:
    """Corpus before it is read."""

    label: str
    """Part of folder names."""
    files: list[Path]
    """Files whose names, sizes and dates change with the corpus."""
    read: Callable[[], Texts]
    """Reads as much as the name and the ends of the splits need."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors of a file or folder into a UserError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; correct data.path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder where a file is expected; move it away or correct data.path") from None
    except NotADirectoryError:
        raise UserError(f"{path}: is a file where a folder is expected; correct data.path") from None
    except PermissionError:
        raise UserError(f"{path}: permission denied; make it readable for this user") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not valid UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path}: cannot be read, cut off or not {path.suffix}: {reason}; get it again") from None


def read_text(path: Path) -> Text:
    """Return the text of one file, by its suffix.

    .txt is taken as it is. .parquet, and .arrow of the `datasets` library, have a string column `text`, whose rows
    that are not blank are joined by line ends. (A row of WikiText has one already; the published experiment doubled
    it too.)
    """

    def read() -> Iterator[bytes]:
        with naming(path), open_regular(path) as stream:
            yield from holding_text(
                path, _characters(path, stream) if path.suffix.lower() == ".txt" else _rows(path, stream)
            )

    return Text(read)


def holding_text(origin: Path | str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pass the pieces on; raise UserError at the end if all are blank."""
    has_text = False
    for piece in pieces:
        has_text = has_text or not is_blank(piece)
        yield piece
    if not has_text:
        raise UserError(f"{origin}: holds no text; remove it or give another file")


def _characters(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    num_bytes = os.fstat(stream.fileno()).st_size
    if num_bytes > MAX_TEXT_BYTES:
        raise UserError(f"{path}: holds more than {MAX_TEXT_BYTES} bytes of text; give a part of it")
    return read_utf8(stream)


def _rows(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    if path.suffix == ".arrow":
        # Read as a whole: of a file, pyarrow allocates whatever length a message claims.
        batches = pa.ipc.open_stream(stream.read())
        check_column(path, batches.schema)
        return text_of(path, map(_validated, batches))
    reading: dict[str, Any] = {
        # By default a whole row group is read, often the whole file.
        "pre_buffer": False,
        "buffer_size": PIECE_BYTES,
        "thrift_string_size_limit": MAX_FOOTER_BYTES,
        "thrift_container_size_limit": MAX_FOOTER_ENTRIES,
    }
    footer = pq.ParquetFile(stream, **reading)
    check_column(path, footer.schema_arrow)
    # As a dictionary a value that is repeated a thousand times is in memory once, and pyarrow refuses batches of more
    # than 2 GiB of different values. DELTA encodings cannot be read as one: there a batch is one row, of 2 GiB at most.
    by_row = _has_delta(footer.metadata)
    parquet = pq.ParquetFile(stream, metadata=footer.metadata, read_dictionary=None if by_row else ["text"], **reading)
    # In pieces: a file of a kilobyte can decompress to terabytes.
    rows = 1 if by_row else ROWS_AT_A_TIME
    return text_of(path, parquet.iter_batches(batch_size=rows, columns=["text"], use_threads=not by_row))


def _has_delta(metadata: pq.FileMetaData) -> bool:
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    columns = (group.column(index) for group in groups for index in range(group.num_columns))
    return any("DELTA" in word for column in columns if column.path_in_schema == "text" for word in column.encodings)


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Damaged offsets would crash the process.
    batch.validate(full=True)
    return batch


def check_column(origin: Path | str, schema: pa.Schema, column: str = "text", way_out: str = RENAME) -> None:
    """There must be exactly one column of this name, of strings."""
    if schema.names.count(column) != 1:
        columns = ", ".join(schema.names) or "none at all"
        raise UserError(f"{origin}: has no column '{column}' (its columns: {columns}); {way_out}")
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{origin}: column '{column}' holds {kind}, must hold strings; convert it")


def text_of(origin: Path | str, batches: Iterable[pa.RecordBatch], column_name: str = "text") -> Iterator[bytes]:
    """Join the rows that are not blank by line ends, counting bytes before decoding."""
    line_end, num_bytes, num_nulls = b"", 0, 0
    for batch in batches:
        column = batch.column(column_name)
        row_ends = np.cumsum(_row_bytes(column))
        num_nulls += column.null_count
        num_bytes += int(row_ends[-1:].sum()) + column.null_count
        if num_bytes > MAX_TEXT_BYTES:
            raise UserError(f"{origin}: holds more than {MAX_TEXT_BYTES} bytes of text; give a part of it")
        first = 0
        while first < len(column) and not num_nulls:
            # Rows that make one piece, or one row of any length.
            piece_end = (row_ends[first - 1] if first else 0) + PIECE_BYTES
            last = max(first + 1, int(np.searchsorted(row_ends, piece_end, side="right")))
            rows = column.slice(first, last - first)
            for number, piece in enumerate(_long_row(rows[0]) if row_ends[last - 1] > piece_end else _joined(rows)):
                yield piece if number else line_end + piece
                line_end = b"\n"
            first = last
    if num_nulls:
        raise UserError(f"{origin}: column '{column_name}' has {num_nulls} nulls; remove these rows or make them ''")


def _joined(rows: pa.Array) -> Iterator[bytes]:
    texts = [row for row in rows.to_pylist() if row and not row.isspace()]
    if texts:
        yield "\n".join(texts).encode()


def _long_row(row: pa.Scalar) -> Iterator[bytes]:
    # Without a `str`: decoding and encoding take several times its memory.
    content = (row.value if isinstance(row, pa.DictionaryScalar) else row).as_buffer()
    if not all(map(is_blank, whole_characters(pa.BufferReader(content)))):
        yield from whole_characters(pa.BufferReader(content))


def _row_bytes(column: pa.Array) -> np.ndarray:
    """Return the bytes of each row that is not null, plus its line end, (rows,) int64."""
    is_dictionary = isinstance(column, pa.DictionaryArray)
    lengths = pc.call_function("binary_length", [column.dictionary if is_dictionary else column])
    lengths = lengths.take(column.indices) if is_dictionary else lengths
    # pyarrow's to_numpy would import pandas, a quarter of a second.
    return np.from_dlpack(lengths.drop_null()).astype(np.int64) + 1


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files with one of the suffixes in any case, by name, without hidden files."""
    with naming(folder):
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return [path for path in paths if not path.name.startswith(".")]


def split_files(folder: Path, suffix: str = ".parquet", prefix: str | None = "") -> dict[str, list[Path]]:
    """Return the files of each split in `folder`: train.parquet, or train-00000-of-00002.parquet and other parts.

    Args:
        prefix: beginning of the names; None: any, but one for all files.
    """
    found: dict[str, list[tuple[Path, re.Match[str]]]] = {}
    for path in list_files(folder, (suffix,)):
        match = SPLIT_NAME.fullmatch(path.stem.lower())
        if match and spoken_split(path.stem) and prefix in (None, match["prefix"] or ""):
            found.setdefault(SPLIT_WORDS[match["word"]], []).append((path, match))
    for split, files in found.items():
        names = ", ".join(path.name for path, _ in files)
        expected = int(files[0][1]["total"] or 1)
        num_parts = len({match["part"] for _, match in files})
        if len({match["total"] for _, match in files}) > 1 or num_parts < len(files):
            raise UserError(f"{folder}: holds the {split} split more than once ({names}); keep one")
        if num_parts != expected:
            raise UserError(f"{folder}: has {num_parts} of the {expected} files of the {split} split; add the others")
    if len({match["prefix"] for files in found.values() for _, match in files}) > 1:
        names = ", ".join(path.name for files in found.values() for path, _ in files)
        raise UserError(f"{folder}: its splits are named after different texts ({names}); keep one text")
    return {split: [path for path, _ in found[split]] for split in SPLITS if split in found}


def spoken_split(name: str) -> str | None:
    """Return the split in the name of a file or folder: "" if unclear or one of several, None if there is none."""
    words = SPLIT_WORD.findall(name.lower())
    return None if not words else SPLIT_WORDS.get(words[0], "") if len(words) == 1 else ""


def read_splits(folder: Path, files: dict[str, list[Path]], wanted: tuple[str, ...] = SPLITS) -> dict[str, Text]:
    """Read every split, its parts joined in order, empty if it has no files."""
    missing = [split for split in wanted if split not in files]
    if missing:
        has = next((f" beside {paths[0].name}" for paths in files.values()), "")
        without = "; data=text with data.test_fraction=0 does without" if missing == ["test"] else ""
        raise UserError(
            f"{folder}: has no {' and no '.join(missing)} split{has}; add it, or give a file as data=text{without}"
        )
    return {split: joined(map(read_text, files.get(split, []))) for split in SPLITS}


def cut(text: Text, validation_fraction: float, test_fraction: float) -> dict[str, Text]:
    """Split off shares of the characters from the end, each cut moved back to the start of its line.

    A line longer than its split is cut inside: some corpora are a single line.
    """
    if validation_fraction + test_fraction >= 1:
        raise UserError(
            f"data.validation_fraction={validation_fraction} and data.test_fraction={test_fraction} leave nothing"
            " to train on; their sum must be below 1"
        )
    num_bytes, num_characters = text.size
    wanted = [round(num_characters * (1 - validation_fraction - test_fraction))] * bool(validation_fraction)
    wanted += [round(num_characters * (1 - test_fraction))] * bool(test_fraction)
    starts = [*text.line_starts(wanted), num_bytes]
    return parts_of(text, starts[0], starts[bool(validation_fraction)])


def parts_of(text: Text, validation_start: int, test_start: int) -> dict[str, Text]:
    edges = [0, validation_start, test_start, text.size.num_bytes]
    return {split: text.part(*edges[index : index + 2]) for index, split in enumerate(SPLITS)}


def find_user_texts(path: Path, validation_fraction: float, test_fraction: float) -> CorpusSource:
    """Find the user's .txt or .parquet file, or folder of such files.

    Files named for splits (train.txt, wiki.valid.txt, Dev.parquet) are these splits; otherwise the files are joined in
    the order of their names, and splits are cut from the end. A name that mentions a split unclearly is refused, lest
    test data are trained on.
    """
    suffixes = (".txt", ".parquet")
    with naming(path):
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    if not is_folder and path.suffix.lower() not in suffixes:
        raise UserError(f"{path}: must end in .txt (UTF-8) or .parquet (a string column 'text'), or be a folder")
    files = list_files(path, suffixes) if is_folder else [path]
    if not files:
        raise UserError(f"{path}: has no .txt and no .parquet file; put the text there or correct data.path")
    if len({file.suffix.lower() for file in files}) > 1:
        raise UserError(f"{path}: holds both .txt and .parquet files; keep one kind, lest a text counts twice")
    named = split_files(path, files[0].suffix.lower(), prefix=None) if is_folder else {}
    strays = [file.name for file in files if not any(file in parts for parts in named.values())]
    unclear = [name for name in strays if spoken_split(Path(name).stem) is not None]
    if is_folder and unclear:
        raise UserError(
            f"{path}: {unclear[0]} is named like a part of the data, but not clearly; rename the files train, "
            "validation and test, or where it is a text like the others give it a name without such a word"
        )
    if named and strays:
        raise UserError(f"{path}: {strays[0]} belongs to no split, other files do; move it away or rename it")

    def read() -> Texts:
        if named:
            splits = read_splits(path, named, SPLITS if test_fraction else ("train", "validation"))
        else:
            splits = cut(joined(map(read_text, files)), validation_fraction, test_fraction)
        return Texts(name=f"text:{path.resolve().stem}", origin=str(path), splits=splits)

    return CorpusSource(label=path.resolve().stem, files=files, read=read)


def find_embedded(root: Path, validation_fraction: float, test_fraction: float) -> CorpusSource:
    """Find English prose without a download: the language reference in CPython's `help()`.

    About 370 thousand characters, which differ between versions of Python, as does the corpus's fingerprint. Written
    once as parquet, one line a row like WikiText-2, see `kept_path`.
    """
    path = kept_path(root, f"embedded/distinct-python-{python_version()}.parquet")
    if not path.exists():
        _write_rows(path, _embedded_rows())

    def read() -> Texts:
        splits = cut(read_text(path), validation_fraction, test_fraction)
        return Texts(name="embedded", origin=str(path), splits=splits)

    return CorpusSource(label="embedded", files=[path], read=read)


def _embedded_rows() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            f"data=embedded: Python {python_version()} here lacks its module pydoc_data.topics;"
            " install it, or use data=text data.path=FILE"
        ) from None
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics[name] for name in sorted(topics)))
    return [row for rows in _distinct([f"{line}\n" for line in p.splitlines()] for p in paragraphs) for row in rows]


def _distinct(paragraphs: Iterable[list[str]]) -> Iterator[list[str]]:
    """Leave out rows that repeat WINDOW_CHARACTERS of others.

    Topics quote each other by the page: otherwise a sixth of a test split would also be in train.
    """
    seen: set[str] = set()
    tail = ""
    for rows in paragraphs:
        text = tail + "".join(f"{row}\n" for row in rows)
        windows = [text[start : start + WINDOW_CHARACTERS] for start in range(len(text) - WINDOW_CHARACTERS + 1)]
        if len(set(windows) - seen) == len(windows):
            seen.update(windows)
            tail = text[1 - WINDOW_CHARACTERS :]
            yield rows


def _write_rows(path: Path, rows: list[str]) -> None:
    """Write one column `text` through a temporary file: another process never reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": rows}), beside)
        beside.rename(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); make its folder writable") from None
