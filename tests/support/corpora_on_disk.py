"""Small corpora on disk, for the tests of what reads them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnbench.data.corpus import Corpus, load_corpus
from attnbench.settings.schema import DataSettings

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
V1, RAW = REAL / "wikitext-2-v1", REAL / "wikitext-2-raw-v1"
needs_real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"WikiText-2 is not in {REAL}")

LINES = [f"line {number} of a text\n" for number in range(60)]


def write_parquet(path: Path, rows: list[str] | pa.Array, column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), path)
    return path


def write_splits(folder: Path, **rows: list[str]) -> Path:
    for split in ("train", "validation", "test"):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", rows.get(split, LINES))
    return folder


def from_path(path: Path, name: str = "text", seq_len: int = 8, **settings) -> Corpus:
    return load_corpus(DataSettings(name=name, path=str(path), **settings), seq_len, ROOT)
