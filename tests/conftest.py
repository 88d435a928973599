"""Paths that several tests need."""

import gc
import logging
import os
import random
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attnbench.settings.registry import TRUSTED

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    # Triton reads it when a kernel is loaded, which is while tests are collected.
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parents[1]

OFFLINE = ROOT / "tests" / "offline"
TRIED = Path(tempfile.mkdtemp(prefix="attnbench-tests-"), "tried")
"""Hosts elsewhere that a test, or a process that it started, wanted to reach."""


def pytest_configure() -> None:
    """Refuse the network here and, through PYTHONPATH, in processes of tests; let SIGHUP stop, also under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["ATTNBENCH_TRIED"] = str(TRIED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OFFLINE), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(OFFLINE / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def asks_nothing_of_the_network() -> Iterator[None]:
    TRIED.write_text("")
    yield
    tried, _ = TRIED.read_text(), TRIED.write_text("")
    assert not tried, f"wanted to reach {tried.split()}"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def does_without_what_takes_longest() -> Iterator[None]:
    """Shorten what takes longest: samples of trainings, the measured speed of matrix products, charts as PNG, fsync.

    test_sample.py, test_timing.py, test_report.py and test_disk.py test these.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnbench.training.sample.NUM_CHARACTERS", 30)
        patch.setattr("attnbench.evals.throughput.matrix_product_ceiling", lambda device, precision: 0.1)
        patch.setattr("attnbench.bench.run.matrix_product_ceiling", lambda device, precision: 1.0)
        # A machine that is lent for its GPU may have nothing to draw with.
        if find_spec("vl_convert"):
            patch.setattr("attnbench.report.charts.style.to_png", lambda svg: b"")
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def leaves_loaded_modules_out_of_garbage_collection() -> None:
    """Make the garbage collection before each measurement a third of a second shorter."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A corpus that small models learn something from in a few steps."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(["cat", "dog", "runs", "over", "green", "tree"], k=8000)))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute sums in one order, so that runs of equal numbers are equal to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_charts(monkeypatch) -> None:
    """Leave the charts of reports empty: drawing them takes seconds."""
    monkeypatch.setattr("attnbench.report.charts.style.to_svg", lambda picture, variants: "<svg/>")


@pytest.fixture(autouse=True)
def trusts_nothing_afterwards() -> Iterator[None]:
    """Forget the classes that a test trusted."""
    before = frozenset(TRUSTED)
    yield
    TRUSTED.intersection_update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give Triton's interpreter to tests of kernels alone: elsewhere a backend for CUDA is refused, as to users."""
    if INTERPRETED and item.path.name.startswith("test_kernels"):
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def run_benchmark(root, monkeypatch):
    """Run scripts/benchmark.py in this process: loading torch anew takes seconds."""

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        runpy.run_path(str(root / "scripts" / "benchmark.py"), run_name="__main__")

    handlers = list(logging.getLogger("attnbench").handlers)
    yield run
    logging.getLogger("attnbench").handlers[:] = handlers
