"""The short form of `make fuzz`: dozens of inputs a kind, the same every time."""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import CAP_MIB, MAX_DEATHS, Reader, fuzz
from fuzz_kinds import KINDS

from attnbench.machine.timing import CappedChild

NUM_INPUTS = {"texts": 50, "parquet": 125, "checkpoints": 15, "results": 40, "overrides": 40}


@pytest.fixture(scope="module")
def child():
    with CappedChild(Reader, CAP_MIB) as child:
        yield child


@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_read_or_refused_in_one_line(kind, child):
    counts, failures = fuzz(child, kind, NUM_INPUTS[kind])
    assert not failures, "\n\n".join(failures)
    # Neither would be a fuzz: one that only refuses sees no further than the first check.
    assert counts["clean"]
    assert counts["refused"]


@pytest.mark.slow
def test_a_reader_that_cannot_start_is_not_started_for_every_input():
    started = []

    class Dying(CappedChild):
        def ask(self, *question):
            started.append(question)
            raise RuntimeError("ended with exit code 1")

    with pytest.raises(RuntimeError, match=f"the reader died {MAX_DEATHS} times in a row, ended with exit code 1"):
        fuzz(Dying(Reader, CAP_MIB), "texts", 5000)
    assert len(started) == MAX_DEATHS


@pytest.mark.slow
def test_the_program_of_make_fuzz_runs():
    program = Path(__file__).parents[2] / "tools" / "fuzz.py"
    command = [sys.executable, program, "--kinds", "texts", "--inputs", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=program.parents[1])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("texts: 4 inputs"), ended.stdout
