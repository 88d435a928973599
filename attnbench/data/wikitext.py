"""WikiText-2: the folders that may hold it, its download, and its two versions."""

import hashlib
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from attnbench.data.hub import download, find_hub, unreachable
from attnbench.data.pieces import Text
from attnbench.data.texts import SPLITS, Source, Texts, naming, read_splits, split_files
from attnbench.settings.errors import UserError
from attnbench.settings.text import open_regular

REPOSITORY = "Salesforce/wikitext"
FOLDERS = {"raw": "wikitext-2-raw-v1", "v1": "wikitext-2-v1"}
"""Folders of the versions: raw, of the published experiment, keeps every character; in v1 rare words read <unk>."""

CHARACTERS = {"raw": (10_916_756, 1_144_610, 1_288_512), "v1": (10_778_301, 1_120_054, 1_254_974)}
"""Numbers of characters of train, validation and test as `read_text` joins them."""

RAW_SHA256 = {
    "train": "e83889baabc497075506f91975be5fac0d45c5290b6b20582c8cd1e853d0c9f7",
    "validation": "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c",
    "test": "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91",
}
"""Checksums of the Hub's parquet files."""

WAY_OUT = (
    "run attnbench data where there is a network and bring its data/ here, or give data.path=FOLDER, or use "
    "data=embedded"
)


def find_wikitext2(path: Path | None, root: Path) -> Source:
    """Find WikiText-2 in `path`, or in the first usual folder that has it (see `find`), or on the Hub.

    The name is that of the version that is read, by the numbers of characters. Other parquet files in a folder that
    the user gave train as well, under the folder's name.
    """
    folder, files = (path, split_files(path)) if path is not None else find(root)
    if folder is None:
        return _loaded(root)
    if not files:
        raise UserError(f"data.path={path}: has no train.parquet nor train-00000-of-00001.parquet; correct data.path")

    def read() -> Texts:
        splits = read_splits(folder, files)
        version = version_of(splits)
        name = f"wikitext2-{'raw-v1' if version == 'raw' else 'v1'}" if version else f"parquet:{folder.resolve().name}"
        return Texts(name=name, origin=str(folder), splits=splits)

    return Source(label="wikitext2", files=[file for parts in files.values() for file in parts], read=read)


def version_of(splits: dict[str, Text]) -> str | None:
    """Return "raw" or "v1" if the splits have the known numbers of characters, otherwise None."""
    lengths = tuple(splits[split].size.num_characters for split in SPLITS)
    return next((version for version, characters in CHARACTERS.items() if characters == lengths), None)


def _loaded(root: Path) -> Source:
    """Load it from the Hub, through `datasets`, which keeps it in its cache."""
    if obstacle := unreachable():
        looked_at = f"neither in {root / 'data'} nor in the Hugging Face cache {_cache_home()}"
        raise UserError(f"WikiText-2 is {looked_at}: {obstacle}; {WAY_OUT}")
    loaded = find_hub(REPOSITORY, FOLDERS["raw"], None, "text", 0.0, 0.0)

    def read() -> Texts:
        splits = loaded.read().splits
        _check_characters(splits, "raw", REPOSITORY)
        return Texts(name="wikitext2-raw-v1", origin=REPOSITORY, splits=splits)

    return Source(label="wikitext2", files=loaded.files, read=read)


def find(root: Path) -> tuple[Path | None, dict[str, list[Path]]]:
    """Return folder and files by split: of data/ under `root`, else of the Hugging Face caches, else None and none.

    Raw comes before v1. A folder of data/ that holds any split is taken, and must then be whole; in the caches
    incomplete folders are skipped, as a cut-off download leaves them behind.
    """
    data = root / "data"
    for folder in (data / FOLDERS["raw"], data, data / FOLDERS["v1"]):
        with naming(folder):
            files = split_files(folder) if folder.is_dir() else {}
        if files:
            return folder, files
    for version in FOLDERS:
        for folder, suffix, prefix in _cached(FOLDERS[version]):
            files = split_files(folder, suffix, prefix)
            if set(files) == set(SPLITS):
                return folder, files
    return None, {}


def _cache_home() -> Path:
    # The same variables in the same order as huggingface_hub and datasets, whose import would take seconds.
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    # A user without a home folder keeps the ~, and has no such cache.
    return Path(os.path.expanduser(os.environ.get("HF_HOME", default)))


def _cached(version_folder: str) -> list[tuple[Path, str, str]]:
    """Return folders of the caches that may hold this version, with the suffix and prefix of their files."""
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or _cache_home() / "hub"
    arrow = os.environ.get("HF_DATASETS_CACHE") or _cache_home() / "datasets"
    snapshots = Path(os.path.expanduser(hub)).glob(f"datasets--Salesforce--wikitext/snapshots/*/{version_folder}")
    tables = Path(os.path.expanduser(arrow)).glob(f"Salesforce___wikitext/{version_folder}/*/*/wikitext-train*.arrow")
    parquet = [(folder, ".parquet", "") for folder in sorted(snapshots)]
    return parquet + [(folder, ".arrow", "wikitext-") for folder in sorted({table.parent for table in tables})]


def _downloaded(version: str) -> Path:
    """Download the published files into the Hugging Face cache; return their folder."""
    try:
        files = [f"{FOLDERS[version]}/{split}-00000-of-00001.parquet" for split in SPLITS]
        return download(REPOSITORY, files)[0].parent
    except UserError as error:
        raise UserError(f"WikiText-2: {error}; {WAY_OUT}") from None


def check_published(folder: Path, version: str) -> None:
    """Raise UserError unless `folder` holds the published text: raw by the files' sha256, v1 by its characters."""
    files = split_files(folder)
    splits = read_splits(folder, files)
    if version == "raw":
        for split in SPLITS:
            for path in files[split]:
                with open_regular(path) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != RAW_SHA256[split]:
                    raise UserError(f"{path}: its sha256 is not that of the published file; get it again")
    _check_characters(splits, version, str(folder))


def _check_characters(splits: dict[str, Text], version: str, origin: str) -> None:
    if version_of(splits) != version:
        counts = ", ".join(f"{split} {splits[split].size.num_characters:,}" for split in SPLITS)
        raise UserError(f"{origin}: is not WikiText-2 {version}, by its characters ({counts}); get it again")


def _check_source(source: Path) -> None:
    """Raise UserError, which names the option of attnbench data, for a folder without all splits."""
    files = split_files(source) if source.is_dir() else {}
    missing = [split for split in SPLITS if split not in files]
    if missing:
        what = f"has no parquet file of {' and '.join(missing)}" if source.is_dir() else "is no folder"
        raise UserError(f"--source {source}: {what}; give the folder with WikiText-2's three, or leave --source out")


def prepare(version: str, source: Path | None, root: Path) -> Path:
    """Put WikiText-2 into data/ under `root`, from the folder `source` or from the Hub; return the new folder.

    Files are checked and copied to a temporary folder, which is then renamed. One that is there already is checked.

    Raises:
        UserError: the text is not the published one or is not there, or data/ cannot be written.
    """
    target = root / "data" / FOLDERS[version]
    if target.exists():
        check_published(target, version)
        return target
    if source is not None:
        _check_source(source)
    folder = source if source is not None else _downloaded(version)
    check_published(folder, version)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Removed whatever happens.
        with TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
            copied = Path(partial) / target.name
            copied.mkdir()
            for paths in split_files(folder).values():
                for path in paths:
                    shutil.copyfile(path, copied / path.name)
            copied.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); make room or give --root=FOLDER") from None
    return target
