"""Signals outside the steps of a training: while torch or tensors are loaded, whatever a library makes of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from runs import ROOT, command, environment, launched, words, write_text
from small import compose_once

from attnbench.comparison.execute import run
from attnbench.data.batches import evaluation_shape
from attnbench.machine.signals import StopRequest, ending_in_one_line, interruptible
from attnbench.model import stored
from attnbench.results.row_files import read_results
from attnbench.settings.errors import Interrupted, UserError
from attnbench.training import job as training_job
from attnbench.training import step as training_step
from attnbench.training.hooks import Sitting
from attnbench.training.log import read_metrics
from attnbench.training.prepare import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    write_text(folder / "small.txt", seed=0)
    return folder


def lost(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def swallowed(number: signal.Signals) -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), number)


def turned_into_another_error(number: signal.Signals) -> None:
    try:
        os.kill(os.getpid(), number)
    except BaseException as error:
        raise ValueError("could not determine the shape of object type") from error


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        *(([], signal.SIGINT), ([], signal.SIGTERM), (["-m"], signal.SIGTERM)),
        pytest.param(["-m"], signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("library", [lost, swallowed, turned_into_another_error])
def test_a_signal_outside_training_ends_the_command_without_a_traceback(
    library, number, mode, folder, monkeypatch, capsys
):
    started = []

    def main(settings) -> Path:
        started.append(settings.seed)
        library(number)
        return folder

    code = launched(monkeypatch, main, [*mode, *words(folder, "seed=1,2" if mode else "seed=1")])
    assert code == 128 + number
    assert started == [1]
    # A sweep names the job that begins.
    stderr = capsys.readouterr().err.removeprefix("[1/2] seed=1\n" if mode else "")
    assert stderr.count("\n") == 1
    assert "the same command" in stderr


def stop_at_step_4(settings, number, monkeypatch) -> None:
    def stop(self, state, report, save=Sitting.keep):
        self.stop.signal = number if state.step == 4 else None
        save(self, state, report)

    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "keep", stop)
        with pytest.raises(Interrupted, match="stopped at step 4"):
            run(settings)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_tensors_are_loaded_loses_nothing(number, folder, monkeypatch):
    settings = compose_once(words(folder, outputs=f"loading{number}"))

    def load(path):
        # So does safetensors: what Python raises while it makes a tensor becomes an error of its own.
        turned_into_another_error(number)

    stop_at_step_4(settings, number, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "load_file", load)
        with pytest.raises(Interrupted, match="the same command") as caught:
            run(settings)
    assert caught.value.exit_code == 128 + number
    run_folder = prepare(settings).folder
    assert not (run_folder / "failed.txt").exists()
    assert run(settings) == run_folder
    assert [row["step"] for row in read_metrics(run_folder / "metrics.jsonl") if "loss" in row] == [2, 4, 6, 8, 10, 12]


def test_a_training_outside_of_the_main_thread_needs_no_signals(folder):
    settings = compose_once(words(folder, outputs="thread"))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run, settings).result() == prepare(settings).folder


def test_deleting_the_folder_that_a_damaged_lone_state_names_lets_the_command_go_on(folder, monkeypatch):
    settings = compose_once(words(folder, outputs="damaged"))

    stop_at_step_4(settings, signal.SIGINT, monkeypatch)
    [weights] = prepare(settings).folder.glob("checkpoint/step-*/weights.safetensors")
    weights.write_bytes(b"")
    with pytest.raises(UserError, match="no older state is kept") as caught:
        run(settings)
    shutil.rmtree(str(caught.value).partition("; no older state is kept; delete ")[2].partition(", and the")[0])
    place = run(settings)
    assert left_of(place) == left_of(run(compose_once(words(folder, outputs="undamaged"))))


@pytest.mark.parametrize("step", [8, 12], ids=["amid", "at the end"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_cuts_off_a_validation_which_is_made_again(number, step, folder, monkeypatch):
    whole = run(compose_once(words(folder, outputs="whole")))
    settings = compose_once(words(folder, outputs=f"cut{number}{step}"))
    place, taken = prepare(settings).folder, []

    def batches(*given, act=training_job.evaluation_batches):
        for batch in act(*given):
            yield batch
            taken.append(batch)
            # In the second or the third validation, after its first batch.
            if len(taken) == (step // 4 - 1) * num_batches + 1:
                os.kill(os.getpid(), number)

    tokens_N = prepare(settings).corpus.tokens["validation"]
    num_batches, _ = evaluation_shape(len(tokens_N), settings.seq_len, settings.train.batch_size)
    assert num_batches > 1
    with monkeypatch.context() as patch:
        patch.setattr(training_job, "evaluation_batches", batches)
        with pytest.raises(Interrupted, match=f"stopped at step {step} of 12") as caught:
            run(settings)
    assert caught.value.exit_code == 128 + number
    assert len(taken) == (step // 4 - 1) * num_batches + 1
    assert [row["step"] for row in read_metrics(place / "metrics.jsonl") if "split" in row] == [4, 8][: step // 4 - 1]
    if step == 12:
        # Ended once more, by what nobody hears, after the validation and before the state is kept.
        with monkeypatch.context() as patch:
            patch.setattr(Sitting, "keep", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(settings)
    assert run(settings) == place
    assert left_of(place) == left_of(whole)


def left_of(place: Path) -> tuple:
    clocks = ("seconds", "tokens_per_second")
    rows = [{name: row[name] for name in row if name not in clocks} for row in read_metrics(place / "metrics.jsonl")]
    weights = {path.parent.name: path.read_bytes() for path in place.rglob("weights.safetensors")}
    [measured] = place.glob("results/perplexity-*.jsonl")
    return rows, weights, [row.measurement for row in read_results(measured)]


def test_a_stop_before_anything_is_there_to_save_is_heard_at_once(folder, monkeypatch):
    settings = compose_once(words(folder, outputs="first"))

    def compile_for_minutes(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on")

    with monkeypatch.context() as patch:
        patch.setattr(training_step, "train_step", compile_for_minutes)
        with pytest.raises(Interrupted, match="before a step was done; the same command resumes"):
            run(settings)
    assert not (prepare(settings).folder / "checkpoint").exists()
    assert left_of(run(settings)) == left_of(run(compose_once(words(folder, outputs="whole"))))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_torch_loads_ends_the_command(number, folder):
    process = subprocess.Popen(
        command(*words(folder, outputs="never")), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    mapped, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 60
    while time.monotonic() < deadline and "libtorch_cpu" not in mapped.read_text():
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert stderr == "interrupted; the same command resumes from what is finished\n"
    assert not (folder / "never").exists()


def test_no_script_loads_torch_before_a_signal_is_one_line():
    scripts = sorted(map(str, (ROOT / "scripts").glob("*.py")))
    assert len(scripts) > 10
    program = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program, *scripts], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("library", [lost, swallowed, turned_into_another_error])
def test_a_script_ends_in_one_line_after_a_signal(library, number, capsys):
    with pytest.raises(SystemExit) as caught, ending_in_one_line("interrupted; all is kept"):
        library(number)
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err == "interrupted; all is kept\n"


def test_a_script_ends_in_one_line_after_what_users_can_mend_and_lets_faults_through():
    with pytest.raises(SystemExit, match=r"^error: no folder \\x1b\[2J$"), ending_in_one_line():
        raise UserError("no folder \x1b[2J")
    with pytest.raises(ZeroDivisionError), ending_in_one_line():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(30, "Read-only file system", "/x\x1b[2J/y"), r"/x\x1b[2J/y: Read-only file system"),
        (OSError("no number"), "no number"),
        (MemoryError(), "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            "can't allocate memory: you tried",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Advice."), "Tried to allocate 2 GiB"),
    ],
)
def test_what_users_can_mend_is_one_line_in_every_command(error, said, folder, monkeypatch, capsys):
    def fail(*_):
        raise error

    with pytest.raises(SystemExit) as caught, ending_in_one_line():
        fail()
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    for main, summarise in ((fail, None), (lambda settings: folder, fail)):
        assert launched(monkeypatch, main, words(folder), summarise) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith("error: ")
        assert said in stderr
        assert stderr.count("\n") == 1
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(type(error)), ending_in_one_line():
        fail()


@pytest.mark.parametrize(("step", "start"), [(2, "from the start"), (6, "from step 4")])
def test_a_second_signal_says_from_where_the_same_command_goes_on(step, start, folder, monkeypatch, capsys):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    def stop_twice(self, state, report, save=Sitting.keep):
        if state.step == step:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        save(self, state, report)

    settings = compose_once(words(folder, outputs=f"twice{step}"))
    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "keep", stop_twice)
        patch.setattr(os, "_exit", end)
        with pytest.raises(Ended, match="130"):
            run(settings)
    lost = "SIGINT again: ended at once, and what was not saved is lost; the same command resumes"
    assert f"\n{lost} {start}\n" in capsys.readouterr().err
    kept = [path.name for path in prepare(settings).folder.glob("checkpoint/step-*")]
    assert kept == (["step-00000004"] if step == 6 else [])


def test_a_second_signal_to_several_trainings_names_the_one_that_has_saved_least(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    with StopRequest().listening() as stop:
        stop.saves, stop.saved_steps = True, {Path("a"): 640, Path("b"): 320}
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert "resumes from what each training has saved, the first from step 320\n" in capsys.readouterr().err


def test_a_closed_terminal_that_a_process_was_told_to_ignore_is_no_stop():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible("stopped"), StopRequest().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_told_of_twice_and_cuts_no_save_short():
    def stop_twice() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(Interrupted) as caught, interruptible("stopped"):
        stop_twice()
    assert caught.value.exit_code == 143
    with StopRequest().listening() as stop:
        stop.saves = True
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == signal.SIGHUP


def test_what_fails_after_a_signal_is_no_failure_unless_it_is_the_save():
    # Ctrl-C ends the compiler too, which is a process of the same terminal.
    def fail(error, number=None):
        with StopRequest().listening() as stop:
            stop.saves = True
            if number is not None:
                os.kill(os.getpid(), number)
            raise error

    with pytest.raises(Interrupted):
        fail(RuntimeError("g++ ended"), signal.SIGINT)
    with pytest.raises(OSError, match="disk full"):
        fail(OSError("disk full"), signal.SIGINT)
    with pytest.raises(RuntimeError):
        fail(RuntimeError("of another cause"))
