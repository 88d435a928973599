"""Small trainings as commands, for the tests of what they leave and how they end."""

import logging
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from small import python_path

from attnbench.cli.launch import launch
from attnbench.results.folder import ROOT

SETTINGS = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("train.num_epochs=null", "train.num_steps=12", "train.batch_size=4", "train.warmup_steps=2"),
    *("train.log_interval_steps=2", "train.validation_interval_steps=4", "data=text"),
    *("eval.perplexity.extrapolation=[2]", "eval.perplexity.batch_tokens=512", "logger=none", "device=cpu"),
]

SMALL = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("train.num_epochs=null", "train.num_steps=6", "train.batch_size=4", "device=cpu", "logger=none"),
]
"""Words of a language model that trains in a second."""


def write_text(path: Path, seed: int) -> None:
    vocabulary = ["the", "cat", "dog", "runs", "over", "under", "green", "blue", "tree", "house", "sees", "it"]
    path.write_text(" ".join(random.Random(seed).choices(vocabulary, k=1500)) + "\n")


def words(folder: Path, *overrides: str, outputs: str = "outputs") -> list[str]:
    return [*SETTINGS, f"data.path={folder / 'small.txt'}", f"outputs_dir={folder / outputs}", *overrides]


def command(*overrides: str) -> list[str]:
    return [sys.executable, "scripts/train.py", *overrides]


def environment() -> dict[str, str]:
    # With one thread sums have one order, and equal last digits.
    return {**python_path(ROOT), "OMP_NUM_THREADS": "1"}


def call(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*overrides), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def launched(monkeypatch, main, overrides: Sequence[str], summarise=None) -> object:
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    logger = logging.getLogger("attnbench")
    handlers = list(logger.handlers)
    try:
        launch(main, "train", summarise)
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        # It would end the tests instead of failing one.
        return "KeyboardInterrupt"
    finally:
        logger.handlers = handlers
    return 0
