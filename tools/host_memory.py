"""Host memory that a large corpus takes and the speed of its tokens, and what a hundred cells in one process leave
behind: `make memory`.

Every figure is of a new process, on a CPU. Speeds are megabytes of text a second of processor time, all threads
together, so that other programs on the machine change them little.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnbench.cli import compose as config
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.machine.memory import reset_resident_peak, resident_peak_mib, trim
from attnbench.results.job import run_jobs
from attnbench.settings.schema import RunSettings

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from probe_settings import smoke_words
from small import python_path

ROOT = Path(__file__).parents[1]
ASCII = [*"abcdefghijklmnopqrstuvwxyz ETAOIN.,\n"]
WIDE = [*ASCII, *map(chr, range(0x400, 0x500)), *map(chr, range(0x4E00, 0x4F00)), "\U0001f600"]
"""More symbols than a byte has, a third of the characters from beyond ASCII."""

ALPHABETS = {"ascii": ASCII, "wide": [*ASCII * 27, *WIDE]}
NUM_WORDS = 10**6
"""Different words of the texts of words, of which the n-th is as frequent as 1 / n."""

MAX_PEAK_MIB = 600
"""Most that any text may take beyond the process."""
SETTLED, MAX_GROWTH_MIB = 10, 4
"""Cells after which all that is loaded once is loaded; growth that all others together may cause."""

TINY = [
    *("experiment=demo", "model.num_layers=1", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24"),
    *("seq_len=256", "train.num_epochs=null", "train.num_steps=300", "train.batch_size=32", "train.warmup_steps=1"),
    *("data.validation_fraction=0.001", "data.test_fraction=0.001", "logger=none", "device=cpu"),
    "eval=[]",
]


def write_corpus(path: Path, alphabet: str, num_mebibytes: int) -> int:
    """Write a text as .txt, .parquet or .jsonl; return its bytes.

    Of an alphabet it is a mebibyte of random lines again and again; of `words` all of it is drawn.
    """
    num_bytes = 0
    with ExitStack() as stack:
        write = _writer(path, stack)
        for lines in islice(_words() if alphabet == "words" else _letters(alphabet), num_mebibytes):
            write(lines)
            # Rows are joined by line ends.
            num_bytes += sum(len(line.encode()) for line in lines) + len(lines) * (path.suffix != ".txt")
    return num_bytes


def _writer(path: Path, stack: ExitStack) -> Callable[[list[str]], object]:
    """Open a file; the result writes lines into it."""
    if path.suffix == ".parquet":
        writer = stack.enter_context(pq.ParquetWriter(path, pa.schema({"text": pa.string()})))
        return lambda lines: writer.write_table(pa.table({"text": lines}))
    file = stack.enter_context(path.open("w", encoding="utf-8"))
    if path.suffix == ".jsonl":
        return lambda lines: file.write("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return lambda lines: file.write("".join(lines))


def _letters(alphabet: str) -> Iterator[list[str]]:
    chance = random.Random(0)
    lines, num_bytes = [], 0
    while num_bytes < 2**20:
        lines.append("".join(chance.choices(ALPHABETS[alphabet], k=2000)) + "\n")
        num_bytes += len(lines[-1].encode())
    return repeat(lines)


def _words() -> Iterator[list[str]]:
    chance, letters = np.random.default_rng(0), np.array([*"etaoinshrdlucmfwypvbgk"])
    shares = 1 / np.arange(1, len(letters) + 1)
    drawn = chance.choice(letters, (NUM_WORDS, 12), p=shares / shares.sum())
    words = ["".join(row[: 2 + index % 9]) for index, row in enumerate(drawn)]
    words[5], words[20], words[100] = "naïve", "–", "it's"
    shares = 1 / np.arange(1, NUM_WORDS + 1)
    ends = np.cumsum(shares / shares.sum())
    while True:
        indices = np.searchsorted(ends, chance.random(165_000)).clip(max=NUM_WORDS - 1).tolist()
        text = " ".join(map(words.__getitem__, indices))
        yield [text[start : start + 2000] + ".\n" for start in range(0, len(text), 2000)]


def training(path: str, *tokenizer: str) -> Iterator[float]:
    """Peak of resident MiB while a text is prepared and trained on, beyond those resident before, and the seconds of
    processor time that its tokens took."""
    from attnbench.comparison.execute import run
    from attnbench.data.corpus import load_corpus
    from attnbench.results import folder as results_folder

    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        # Tokens are kept there, not in the checkout.
        results_folder.ROOT = Path(folder)
        os.chdir(folder)
        source = [f"data.path={path}", "data=text"]
        if Path(path).suffix not in (".txt", ".parquet"):
            source = ["data=hub", f"data.name={path}"]
        settings = config.compose([*TINY, *source, *tokenizer, f"outputs_dir={folder}/outputs"])
        _train_a_little(run, settings, Path(folder))
        before = reset_resident_peak()
        assert before is not None
        started = time.process_time()
        load_corpus(settings.data, settings.seq_len, Path(folder))
        seconds = time.process_time() - started
        run(settings)
        yield resident_peak_mib() - before
        yield seconds


def _train_a_little(run, settings: RunSettings, folder: Path) -> None:
    """Load all that a training loads once, and give back all that the C library keeps of it."""
    little = folder / "little.txt"
    write_corpus(little, "ascii", 1)
    name, path = settings.data.name, settings.data.path
    settings.data.name, settings.data.path = "text", str(little)
    # Splits of a thousandth of this would be shorter than a sequence.
    fractions = settings.data.validation_fraction, settings.data.test_fraction
    settings.data.validation_fraction = settings.data.test_fraction = 0.01
    run(settings)
    settings.data.name, settings.data.path = name, path
    settings.data.validation_fraction, settings.data.test_fraction = fractions
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


def measured(what: str, *arguments: object) -> list[float]:
    """Run `training` or `cells` in a new process."""
    command = [sys.executable, __file__, "--alone", what, *map(str, arguments)]
    environment = {**python_path(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def training_figures(alphabet: str, kind: str, num_mebibytes: int, *tokenizer: str) -> tuple[float, float, float]:
    """Megabytes of a corpus, the peak of resident MiB for it, and the megabytes a second of its tokens.

    Args:
        kind: the suffix of its file, or `hub`, a data set's folder with a file of JSON lines.
        tokenizer: settings of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("set" if kind == "hub" else f"corpus{kind}")
        if kind == "hub":
            path.mkdir()
            # The package's cache too.
            os.environ["HF_HOME"] = folder
        file = path / "train.jsonl" if kind == "hub" else path
        corpus = write_corpus(file, alphabet, num_mebibytes) / 1e6
        peak, seconds = measured("training", path, *tokenizer)
    return corpus, peak, corpus / seconds


BPE = ("data.tokenizer=bpe", "data.vocabulary_size=8192", "train.num_steps=4", "train.batch_size=4")
"""Few and small steps: the logits of so large a vocabulary take more time and memory than a text's tokens."""
CORPORA = [
    ("ascii", ".txt", ("data.tokenizer=characters",), 20),
    ("wide", ".txt", ("data.tokenizer=characters",), 20),
    ("words", ".txt", ("data.tokenizer=characters",), 20),
    ("words", ".txt", ("data.tokenizer=bytes",), 20),
    ("words", ".parquet", ("data.tokenizer=characters",), 20),
    ("words", "hub", ("data.tokenizer=bytes",), 0),
    ("words", ".txt", BPE, 2),
]
"""Alphabets, files and tokenizers, and the megabytes a second that are wanted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=954, help="of each corpus; 954 are a gigabyte")
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="*", help="some of the corpora, by their numbers from 0")
    parser.add_argument("--alone", nargs="+", metavar=("WHAT", "ARGUMENT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        what, *arguments = given.alone
        print(json.dumps([*{"training": training, "cells": cells}[what](*arguments)]))
        return
    is_kept = True
    for index, (alphabet, kind, tokenizer, wanted) in enumerate(CORPORA):
        if given.only is not None and index not in given.only:
            continue
        corpus, peak, speed = training_figures(alphabet, kind, given.mebibytes, *tokenizer)
        name = tokenizer[0].partition("=")[2]
        print(f"{alphabet} {kind} {name}: {corpus:.0f} MB, {peak:.0f} MiB at most, {speed:.1f} MB/s", flush=True)
        is_kept &= peak < MAX_PEAK_MIB and speed >= wanted
    if not given.cells:
        sys.exit(0 if is_kept else 1)
    resident = measured("cells", given.cells)
    shown = ", ".join(f"{resident[count - 1]:.1f} after {count}" for count in (1, SETTLED, len(resident)))
    print(f"{len(resident)} cells in one process, MiB resident: {shown}")
    sys.exit(0 if is_kept and resident[-1] < resident[SETTLED - 1] + MAX_GROWTH_MIB else 1)


if __name__ == "__main__":
    main()
