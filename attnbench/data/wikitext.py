import hashlib
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from attnbench.data.hub import download, find_hub, unreachable
from attnbench.data.pieces import Text
from attnbench.data.texts import SPLITS, CorpusSource, Texts, naming, read_splits, split_files
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import open_regular

REPOSITORY = "Salesforce/wikitext"
FOLDERS = {"raw": "wikitext-2-raw-v1", "v1": "wikitext-2-v1"}
"""Versions: raw (in the published experiment) keeps every character, v1 has <unk> for rare words."""

CHARACTERS = {"raw": (10_916_756, 1_144_610, 1_288_512), "v1": (10_778_301, 1_120_054, 1_254_974)}
"""Characters of train, validation and test as `read_text` joins them."""

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


def find_wikitext2(path: Path | None, root: Path) -> CorpusSource:
    """Find WikiText-2 in `path`, or in the first usual folder that has it (see `find`), or on the Hub.

    The numbers of characters tell the version. Other parquet files are accepted too, under their folder's name.
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

    return CorpusSource(label="wikitext2", files=[file for parts in files.values() for file in parts], read=read)


def version_of(splits: dict[str, Text]) -> str | None:
    """Return "raw" or "v1" by the numbers of characters."""
    lengths = tuple(splits[split].size.num_characters for split in SPLITS)
    return next((version for version, characters in CHARACTERS.items() if characters == lengths), None)


def _loaded(root: Path) -> CorpusSource:
    if obstacle := unreachable():
        looked_at = f"neither in {root / 'data'} nor in the Hugging Face cache {_cache_home()}"
        raise UserError(f"WikiText-2 is {looked_at}: {obstacle}; {WAY_OUT}")
    loaded = find_hub(REPOSITORY, FOLDERS["raw"], None, "text", 0.0, 0.0)

    def read() -> Texts:
        splits = loaded.read().splits
        _check_characters(splits, "raw", REPOSITORY)
        return Texts(name="wikitext2-raw-v1", origin=REPOSITORY, splits=splits)

    return CorpusSource(label="wikitext2", files=loaded.files, read=read)


def find(root: Path) -> tuple[Path | None, dict[str, list[Path]]]:
    """Return folder and files by split, from data/ under `root` or the Hugging Face caches; None and {} if not
    found.

    Raw comes before v1. A folder of data/ with any split is taken and must be complete; in the caches incomplete
    folders, left by interrupted downloads, are skipped.
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
    # As in huggingface_hub and datasets, whose import takes seconds.
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HOME", default)))


def _cached(version_folder: str) -> list[tuple[Path, str, str]]:
    """Return folders in the caches that may hold this version, with suffix and prefix of their files."""
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or _cache_home() / "hub"
    arrow = os.environ.get("HF_DATASETS_CACHE") or _cache_home() / "datasets"
    snapshots = Path(os.path.expanduser(hub)).glob(f"datasets--Salesforce--wikitext/snapshots/*/{version_folder}")
    tables = Path(os.path.expanduser(arrow)).glob(f"Salesforce___wikitext/{version_folder}/*/*/wikitext-train*.arrow")
    parquet = [(folder, ".parquet", "") for folder in sorted(snapshots)]
    return parquet + [(folder, ".arrow", "wikitext-") for folder in sorted({table.parent for table in tables})]


def check_published(folder: Path, version: str) -> None:
    """The folder must hold the published text, by sha256 (raw) or by numbers of characters (v1)."""
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


def prepare(version: str, source: Path | None, root: Path) -> Path:
    """Put WikiText-2 into data/ under `root`, from the folder `source` or the Hub; return the new folder."""
    target = root / "data" / FOLDERS[version]
    if target.exists():
        check_published(target, version)
        return target
    if source is not None:
        files = split_files(source) if source.is_dir() else {}
        missing = [split for split in SPLITS if split not in files]
        if missing:
            fault = f"has no parquet file of {' and '.join(missing)}" if source.is_dir() else "is no folder"
            raise UserError(
                f"--source {source}: {fault}; give the folder with WikiText-2's three, or leave --source out"
            )
        folder = source
    else:
        try:
            files = [f"{FOLDERS[version]}/{split}-00000-of-00001.parquet" for split in SPLITS]
            folder = download(REPOSITORY, files)[0].parent
        except UserError as error:
            raise UserError(f"WikiText-2: {error}; {WAY_OUT}") from None
    check_published(folder, version)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
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
