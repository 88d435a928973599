"""Output that nobody takes: the work goes on, and what a command prints for its own sake ends it quietly."""

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from runs import ROOT, command, environment, words, write_text

from attnbench.machine.signals import Lasting, answering, lasting_streams
from attnbench.settings.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_text(folder / "small.txt", seed=0)
    return folder


def closed_pipe() -> int:
    """A pipe to `head`, which has what it wanted."""
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal() -> int:
    master, slave = pty.openpty()
    os.close(master)
    return slave


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


PLACES = [closed_pipe, closed_terminal, full_disk]


@pytest.mark.parametrize("opened", PLACES)
def test_what_cannot_be_written_is_lost_and_no_error(opened):
    descriptor = opened()
    with open(descriptor, "w", buffering=1) as stream:
        lasting = Lasting(stream)
        for _ in range(3):
            assert lasting.write("a line\n") == 7
        lasting.write("not yet flushed")
        lasting.flush()
        assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
        assert (lasting.encoding, lasting.isatty()) == (stream.encoding, False)


@pytest.mark.parametrize("opened", PLACES)
def test_what_waits_in_the_buffer_is_no_error_at_the_end(opened, monkeypatch):
    with open(opened(), "w", buffering=4096) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", None)
        with lasting_streams():
            print("a line")
            print("a line", file=sys.stderr, flush=True)
        assert sys.stdout is stream
        monkeypatch.undo()


@pytest.mark.parametrize(("opened", "is_error"), [(closed_pipe, False), (closed_terminal, True), (full_disk, True)])
def test_an_answer_that_nothing_takes_is_an_error_unless_its_reader_has_seen_enough(opened, is_error, monkeypatch):
    with open(opened(), "w", buffering=4096) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        cannot = pytest.raises(UserError, match=r"^standard output: cannot be written to \(")
        with lasting_streams(), cannot if is_error else nullcontext(), answering() as output:
            assert output is stream
            # It waits in the buffer, and what is in it is lost at the end.
            print("a line", file=output)
        monkeypatch.undo()


def ended(opened: Callable[[], int], streams: set[str], *command: str) -> tuple[int, str]:
    descriptor = opened()
    given = {name: descriptor if name in streams else subprocess.PIPE for name in ("stdout", "stderr")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **given)
    os.close(descriptor)
    _, said = process.communicate(timeout=120)
    return process.returncode, said or ""


@pytest.mark.parametrize(
    ("opened", "streams"),
    [
        (closed_pipe, {"stdout", "stderr"}),
        pytest.param(full_disk, {"stdout"}, marks=pytest.mark.slow),
        pytest.param(closed_terminal, {"stdout", "stderr"}, marks=pytest.mark.slow),
        pytest.param(full_disk, {"stderr"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_to_its_end(opened, streams, folder):
    outputs = f"{opened.__name__}-{'-'.join(sorted(streams))}"
    code, said = ended(opened, streams, *command(*words(folder, outputs=outputs)))
    assert code == 0, said
    [state] = (folder / outputs).glob("demo/*/checkpoint/final/state.json")
    assert len([*state.parents[2].glob("results/*.jsonl")]) == 2
    assert "evaluating perplexity" in (state.parents[2] / "train.log").read_text()
    assert "Exception" not in said


def test_generated_text_says_that_the_disk_is_full(folder):
    run = next(folder.glob("closed_pipe-*/demo/*"))
    generate = [sys.executable, "scripts/generate.py", f"run={run}", "prompt=the", "num_tokens=20", "device=cpu"]
    code, said = ended(full_disk, {"stdout"}, *generate)
    assert code == 1, said
    assert said.splitlines()[-1] == "error: standard output: cannot be written to (No space left on device)"


def test_a_character_that_an_encoding_lacks_is_a_question_mark(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with lasting_streams():
        print("1 \N{EN DASH} 2")
        with answering() as output:
            print("\N{MULTIPLICATION SIGN}", file=output)
    monkeypatch.undo()
    assert written.getvalue() == b"1 ? 2\n?\n"
