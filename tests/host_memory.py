"""Host memory that a large corpus takes, and that a hundred cells in one process leave behind: `make memory`.

Every figure is of a new process, on a CPU.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from probe_settings import smoke_words
from small import python_path

from attnbench.cli import compose as config
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.machine.memory import reset_resident_peak, resident_peak_mib, trim
from attnbench.results.job import run_jobs
from attnbench.settings.schema import RunSettings

ROOT = Path(__file__).parents[1]
ASCII = [*"abcdefghijklmnopqrstuvwxyz ETAOIN.,\n"]
WIDE = [*ASCII, *map(chr, range(0x400, 0x500)), *map(chr, range(0x4E00, 0x4F00)), "\U0001f600"]
"""More symbols than a byte has, a third of the characters from beyond ASCII."""

ALPHABETS = {"ascii": ASCII, "wide": [*ASCII * 27, *WIDE]}
SETTLED, MAX_GROWTH_MIB = 10, 4
"""Cells after which all that is loaded once is loaded; growth that all others together may cause."""

TINY = [
    *("experiment=demo", "model.num_layers=1", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24"),
    *("seq_len=256", "train.num_epochs=null", "train.num_steps=4", "train.batch_size=4", "train.warmup_steps=1"),
    *("data=text", "data.validation_fraction=0.0001", "data.test_fraction=0.0001", "logger=none", "device=cpu"),
    "eval=[]",
]


def write_corpus(path: Path, alphabet: str, num_mebibytes: int) -> int:
    """Write a mebibyte of random lines again and again, as .txt or as .parquet; return the bytes of text."""
    chance = random.Random(0)
    text, lines = "", []
    while len(text.encode()) < 2**20:
        lines.append("".join(chance.choices(ALPHABETS[alphabet], k=2000)) + "\n")
        text += lines[-1]
    if path.suffix == ".parquet":
        table = pa.table({"text": lines})
        with pq.ParquetWriter(path, table.schema) as writer:
            for _ in range(num_mebibytes):
                writer.write_table(table)
        return num_mebibytes * len("\n".join(lines).encode())
    with path.open("wb") as file:
        for _ in range(num_mebibytes):
            file.write(text.encode())
    return num_mebibytes * len(text.encode())


def training(path: str) -> Iterator[float]:
    """Peak of resident MiB while a text is prepared and trained on, beyond those resident before."""
    from attnbench.comparison.execute import run

    with tempfile.TemporaryDirectory() as folder:
        settings = config.compose([*TINY, f"data.path={path}", f"outputs_dir={folder}"])
        _train_a_little(run, settings, Path(folder))
        before = reset_resident_peak()
        run(settings)
        assert before is not None
        yield resident_peak_mib() - before


def _train_a_little(run, settings: RunSettings, folder: Path) -> None:
    """Load all that a training loads once, and give back all that the C library keeps of it."""
    little = folder / "little.txt"
    write_corpus(little, "ascii", 1)
    path, settings.data.path = settings.data.path, str(little)
    # Splits of a thousandth of this would be shorter than a sequence.
    fractions = settings.data.validation_fraction, settings.data.test_fraction
    settings.data.validation_fraction = settings.data.test_fraction = 0.01
    run(settings)
    settings.data.path, (settings.data.validation_fraction, settings.data.test_fraction) = path, fractions
    gc.collect()
    trim()


def cells(number: str) -> Iterator[float]:
    """Resident MiB after each of so many trainings of a probe, each with another seed, in one process."""
    words = ["experiment=demo", "logger=none", "device=cpu", "eval=copy", *smoke_words("copy")]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(number)):
            settings = config.compose([*words, f"outputs_dir={folder}", f"seed={seed}"])
            _, [job] = prepare_probe(settings, settings.evaluations[0])
            run_jobs([job.at(1e-2, seed)])
            gc.collect()
            trim()
            reset_resident_peak()
            yield resident_peak_mib()


def measured(what: str, argument: object) -> list[float]:
    """Run `training` or `cells` in a new process."""
    command = [sys.executable, __file__, "--alone", what, str(argument)]
    done = subprocess.run(command, env=python_path(ROOT), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def training_figures(alphabet: str, suffix: str, num_mebibytes: int) -> tuple[float, float]:
    """MiB of a corpus, and the peak of resident MiB for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus{suffix}"
        corpus = write_corpus(path, alphabet, num_mebibytes) / 2**20
        [peak] = measured("training", path)
    return corpus, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=300, help="of each corpus")
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--alone", nargs=2, metavar=("WHAT", "ARGUMENT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        what, argument = given.alone
        print(json.dumps([*{"training": training, "cells": cells}[what](argument)]))
        return
    is_kept = True
    for alphabet, suffix in (("ascii", ".txt"), ("wide", ".txt"), ("ascii", ".parquet")):
        corpus, peak = training_figures(alphabet, suffix, given.mebibytes)
        times = peak / corpus
        print(f"{alphabet} {suffix}: {corpus:.0f} MiB of text, {peak:.0f} MiB at most, {times:.2f} times", flush=True)
        is_kept &= times < 2
    resident = measured("cells", given.cells)
    shown = ", ".join(f"{resident[count - 1]:.1f} after {count}" for count in (1, SETTLED, len(resident)))
    print(f"{len(resident)} cells in one process, MiB resident: {shown}")
    sys.exit(0 if is_kept and resident[-1] < resident[SETTLED - 1] + MAX_GROWTH_MIB else 1)


if __name__ == "__main__":
    main()
