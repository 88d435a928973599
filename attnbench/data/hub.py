"""Texts from the Hugging Face Hub through its package `datasets`, imported only here and only when used."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from attnbench.data.pieces import Text
from attnbench.data.texts import (
    SPLITS,
    CorpusSource,
    Texts,
    check_column,
    cut,
    holding_text,
    naming,
    spoken_split,
    text_of,
)
from attnbench.machine.environment import answers
from attnbench.machine.memory import memory_capped
from attnbench.settings.errors import UserError

PROBE_SECONDS = 1.5

CONVERSION_MIB = 2048
"""Memory that `datasets` may take to convert files: a file of a kilobyte can decompress to gigabytes."""

ROWS_AT_A_TIME = 1024
"""Rows of a parquet file that it converts at a time; its default is a row group, and fails where that is empty."""

MAX_REASON_CHARACTERS = 300
"""Longest quotation of a library's message."""


def find_hub(
    name: str, config: str | None, files: str | None, column: str, validation_fraction: float, test_fraction: float
) -> CorpusSource:
    """Load a data set of the Hub, OWNER/NAME, or a folder laid out as one, into the cache of `datasets`.

    Its splits train, validation and test are used. A missing one is cut by its fraction from the end of train, or of
    the only split if that has another name; other splits are left out. `files` are those to load, a name or pattern.
    """
    loaded, origin = _load(name, config, files), f"data.name={name}"
    train = "train" if "train" in loaded else next(iter(loaded))
    if train != "train" and (len(loaded) > 1 or train in SPLITS):
        raise UserError(f"{origin}: has no train split, only {', '.join(loaded)}; give its files as data=text")
    for rows in loaded.values():
        check_column(origin, rows.features.arrow_schema, column, "name another as data.column")

    def read() -> Texts:
        there = [split for split in SPLITS[1:] if split in loaded and split != train]
        fractions = [
            0.0 if split in there else fraction
            for split, fraction in (("validation", validation_fraction), ("test", test_fraction))
        ]
        splits = cut(_text(loaded[train], column, origin), *fractions)
        splits |= {split: _text(loaded[split], column, origin) for split in there}
        called = Path(name).resolve().name if Path(name).is_dir() else name
        return Texts(name=":".join(filter(None, ("hub", called, config, files))), origin=origin, splits=splits)

    label = "-".join(filter(None, (Path(name).name, config)))
    return CorpusSource(label=label, files=[path for rows in loaded.values() for path in _tables(rows)], read=read)


def _load(name: str, config: str | None, files: str | None) -> Any:
    """Load the splits; from the cache if the Hub cannot be reached."""
    is_folder = Path(name).is_dir()
    if not is_folder and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"data.name={name}: is no folder, and no OWNER/NAME of a data set on the Hugging Face Hub")
    obstacle = "" if is_folder else unreachable()

    import datasets.config
    import datasets.exceptions

    called = f"data.name={name}" + (f" data.config={config}" if config else "") + (f" data.files={files}" * bool(files))
    try:
        with _offline(datasets.config, bool(obstacle)):
            builder = datasets.load_dataset_builder(name, config, data_files=files)
    # The errors of HTTP, file systems, yaml and Arrow have no common class.
    except Exception as error:
        if obstacle:
            raise UserError(
                f"{called}: {obstacle}, and the cache of `datasets` does not have it; load it once where there is a "
                "network, or give its files as data=text data.path=FOLDER"
            ) from None
        raise UserError(f"{called}: cannot be loaded ({_said(error)}); correct data.name and data.config") from None
    _check_files(called, builder, Path(name) if is_folder else None, files)
    if getattr(builder.config, "batch_size", 0) is None:
        builder.config.batch_size = ROWS_AT_A_TIME  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _offline(datasets.config, bool(obstacle)), memory_capped(CONVERSION_MIB):
            builder.download_and_prepare()
        return builder.as_dataset()
    except Exception as error:  # As above.
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        if any(isinstance(cause, MemoryError) for cause in causes):
            raise UserError(
                f"{called}: a file of it takes more than {CONVERSION_MIB / 1024:.1f} GiB of memory to convert; cut it "
                "into shorter lines, or give the text as data=text"
            ) from None
        remedy = "try again, or give its files as data=text"
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            remedy = "mend or remove the file"
        raise UserError(f"{called}: a file of it cannot be read ({_said(causes[-1])}); {remedy}") from None


def _check_files(called: str, builder: Any, folder: Path | None, files: str | None) -> None:
    """Refuse a folder that reads files outside itself, or a train split with files named for another."""
    roots = [] if folder is None else [folder.resolve()]
    if roots and roots[0].parent.name == "snapshots":
        # Snapshots in the Hub's cache are links to the content beside them.
        roots.append(roots[0].parents[1] / "blobs")
    for split, paths in (builder.config.data_files or {}).items():
        for path in map(str, paths):
            if roots and ("://" in path or not any(Path(path).resolve().is_relative_to(root) for root in roots)):
                raise UserError(f"{called}: reads {path}, which is not in that folder; remove it or copy it there")
            # A single file that the user names may have any name.
            if split == "train" and not (files and not re.search(r"[*?[]", files)):
                inside = Path(path).relative_to(folder.resolve()) if folder else Path(path.rpartition("@")[2])
                spoken = [
                    word for word in map(spoken_split, reversed(inside.with_suffix("").parts)) if word is not None
                ]
                if spoken and spoken[0] in SPLITS[1:]:
                    raise UserError(
                        f"{called}: its train split takes {inside}, which is named for {spoken[0]}; name the files "
                        "train, validation and test, or some of them as data.files"
                    )


def _tables(rows: Any) -> list[Path]:
    return [Path(file["filename"]) for file in rows.cache_files]


def _text(rows: Any, column: str, origin: str) -> Text:
    def batches() -> Iterator[pa.RecordBatch]:
        # Not mapped into memory, as `datasets` does.
        for table in _tables(rows):
            with naming(table), pa.OSFile(str(table)) as file, pa.ipc.open_stream(file) as stream:
                yield from stream

    return Text(lambda: holding_text(origin, text_of(origin, batches(), column)))


@contextmanager
def _offline(settings: Any, is_offline: bool) -> Iterator[None]:
    """Make `datasets` use its cache alone instead of waiting for a network; it reads its variable once, at import."""
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or is_offline
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


def download(repository: str, files: list[str]) -> list[Path]:
    """Download files of a data set into the Hugging Face cache, unchanged."""
    if obstacle := unreachable():
        raise UserError(obstacle)

    import datasets

    urls = [f"hf://datasets/{repository}/{file}" for file in files]
    try:
        paths: Any = datasets.DownloadManager().download(urls)
    except Exception as error:  # As in `_load`.
        raise UserError(f"the download from {_endpoint()} failed ({_said(error)})") from None
    return [Path(path) for path in paths]


def unreachable() -> str:
    """Return why the Hub cannot be reached, within two seconds; empty if it answers."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    endpoint = _endpoint()
    return "" if answers(endpoint, PROBE_SECONDS) else f"{urlsplit(endpoint).hostname or endpoint} cannot be reached"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARACTERS] or type(error).__name__
