"""One model trained by two processes: as one process trains it, stopped, killed, and gone on with by another number."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from runs import ROOT, environment, launched, words, write_text
from small import compose_once

from attnbench.cli.launch import RANK_0_SECONDS
from attnbench.comparison.execute import run
from attnbench.machine import group as groups
from attnbench.machine.ranks import ALONE, Ranks, ranks_here
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.schema import RunSettings
from attnbench.training import follow
from attnbench.training import step as training_step
from attnbench.training.checkpoint import TrainState, load_counters
from attnbench.training.job import Run
from attnbench.training.log import read_metrics

SECONDS = 60
"""A pair of processes that has not ended by then never will."""
CLOCKS = ("tokens_per_second", "train_seconds", "first_step_seconds")
EVERY_STEP = [
    *("train.num_steps=20", "train.log_interval_steps=1", "train.validation_interval_steps=10"),
    *("eval.perplexity.characters=100", "seq_len=16"),
]
ONE_ROW = ["attn=softmax", "train.micro_batch_size=1"]
SIXTY_STEPS = ["train.num_steps=60", "train.validation_interval_steps=30", "train.learning_rate=1e-3"]
"""At a larger rate rounding grows past 1e-5 in so many steps."""
AT = 6
"""Steps that are done when a process is stopped or killed."""
SLOW = pytest.mark.slow

Act = Callable[[int, TrainState], None]
"""Called in each process before every step with its rank and the state."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a text, small.txt."""
    folder = tmp_path_factory.mktemp("together")
    write_text(folder / "small.txt", seed=0)
    return folder


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch) -> None:
    """Gradients of several buckets a step, though the models are small."""
    monkeypatch.setattr(groups, "BUCKET_ELEMENTS", 1_000)


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Environment variables of torchrun."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def together(settings: RunSettings, act: Act | None = None, size: int = 2) -> list[tuple[int, str]]:
    """Run in as many forks of this process; return the exit code of each, below 0 after a signal, and its lines."""
    outputs = Path(settings.outputs_dir)
    outputs.mkdir(exist_ok=True)
    port, paths = free_port(), [outputs / f"rank{rank}.txt" for rank in range(size)]
    started = []
    for rank, path in enumerate(paths):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, variables(rank, size, port), settings, act, path)
        started.append(pid)
    return [(_exit_code(pid), path.read_text()) for pid, path in zip(started, paths, strict=True)]


def _be_rank(rank: int, given: dict[str, str], settings: RunSettings, act: Act | None, path: Path) -> None:
    code = 70
    try:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = sys.__stderr__ = os.fdopen(os.dup(2), "w", buffering=1)
        os.environ.update(given)
        torch.set_num_threads(1)
        if act is not None:

            def train_step(state, *arguments, step=training_step.train_step):
                act(rank, state)
                return step(state, *arguments)

            training_step.train_step = train_step
        try:
            run(settings)
            code = 0
        except Interrupted as end:
            code = end.exit_code
            print(end, file=sys.stderr)
        except UserError as error:
            code = 1
            if rank == 0:
                print(f"error: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)


def _exit_code(pid: int) -> int:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {SECONDS} s")


def settings_of(folder: Path, outputs: str, *overrides: str) -> RunSettings:
    """Without evaluations, which rank 0 makes as a process alone does: `test_torchrun_sweeps` has one."""
    return replace(compose_once(words(folder, *EVERY_STEP, *overrides, outputs=outputs)), evaluations=[])


def folder_of(settings: RunSettings) -> Path:
    (path,) = (path.parent for path in Path(settings.outputs_dir).glob("*/*/metrics.jsonl"))
    return path


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def training_rows(folder: Path) -> list[ResultRow]:
    (path,) = (folder / "results").glob("training-*.jsonl")
    return read_results(path)


@pytest.fixture(scope="module")
def alone(folder) -> Iterator[Callable[..., Path]]:
    """Train in this process, once, and return the folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cache(lambda *given: run(settings_of(folder, f"alone-{len(given)}", *given)))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("mixer", "micro"),
    [
        ("softmax", "1"),
        ("gated_deltanet", "null"),
        pytest.param("softmax", "null", marks=SLOW),
        pytest.param("gated_deltanet", "1", marks=SLOW),
    ],
)
def test_two_processes_train_as_one_does(mixer, micro, folder, alone):
    given = [f"attn={mixer}", f"train.micro_batch_size={micro}", *SIXTY_STEPS]
    one = alone(*given)
    settings = settings_of(folder, f"two-{mixer}-{micro}", *given)
    assert [code for code, _ in together(settings)] == [0, 0]
    two = folder_of(settings)
    assert two.name == one.name
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert len(losses(two)) == 60
    assert load_counters(two / "checkpoint" / "final")["num_devices"] == 2
    rows, expected = training_rows(two), training_rows(one)
    assert [(row.measurement.metric, row.measurement.settings) for row in rows] == [
        (row.measurement.metric, row.measurement.settings) for row in expected
    ]
    assert {row.identity for row in rows} == {replace(row.identity, num_devices=2) for row in expected}
    same = [row.measurement.value for row in rows if row.measurement.metric not in CLOCKS]
    assert same == pytest.approx([row.measurement.value for row in expected if row.measurement.metric not in CLOCKS])
    speed = next(row.measurement for row in rows if row.measurement.metric == "tokens_per_second")
    assert speed.status == "not_reached"


def counting(path: Path) -> Act:
    """Write a line whenever a backward pass has completed its last gradient, that of the embedding: the number of sums
    that rank 0 has begun."""

    def act(rank: int, state: TrainState) -> None:
        if rank != 0 or state.step > 0:
            return
        begun, kind = [], torch.distributed.ProcessGroup

        def begin(group, tensors, begin=kind.allreduce_coalesced):
            begun.append(tensors)
            return begin(group, tensors)

        def write(parameter: torch.Tensor) -> None:
            with path.open("a") as file:
                file.write(f"{len(begun)}\n")

        kind.allreduce_coalesced = begin  # pyright: ignore[reportAttributeAccessIssue]
        state.model.embedding.weight.register_post_accumulate_grad_hook(write)

    return act


def begun_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def test_gradients_are_added_up_while_the_last_backward_pass_runs(folder):
    settings = settings_of(folder, "overlapped", "attn=softmax", "train.micro_batch_size=1", "train.num_steps=2")
    ended = together(settings, counting(folder / "overlapped.txt"))
    assert [code for code, _ in ended] == [0, 0], ended
    # Two micro-batches a step, and the embedding's own gradient is sent later.
    first, second, third, fourth = begun_in(folder / "overlapped.txt")
    assert first == 0
    assert second > 1
    assert third == second + 1
    assert fourth == third + second


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_checkpoint_goes_on_with_another_number_of_processes(sizes, folder, alone):
    """Cut off half way by a signal, and gone on with by the other number."""
    settings = settings_of(folder, f"from{sizes[0]}", *ONE_ROW)

    def stop(rank: int, state: TrainState) -> None:
        if rank == 0 and state.step == AT:
            os.kill(os.getpid(), signal.SIGTERM)

    if sizes[0] == 1:
        # One fork without torchrun's variables is one process.
        assert together(settings, stop, size=1)[0][0] == 143
    else:
        assert together(settings, stop)[0][0] == 143
    assert [code for code, _ in together(settings, size=sizes[1])] == [0] * sizes[1]
    resumed = folder_of(settings)
    assert losses(resumed) == pytest.approx(losses(alone(*ONE_ROW)), abs=1e-5)
    rows = training_rows(resumed)
    assert {row.identity.num_devices for row in rows} == {sizes[1]}
    # A speed of both would be that of neither.
    assert not {row.measurement.metric for row in rows} & set(CLOCKS)
    assert "its speed is not recorded" in (resumed / "train.log").read_text()


@pytest.mark.parametrize("asked", [(0, 1), pytest.param((1,), marks=SLOW)])
def test_a_signal_to_any_process_stops_all_at_one_step(asked, folder, alone):
    """Ctrl-C and torchrun's SIGTERM reach all; a signal to one is one to all."""
    settings = settings_of(folder, f"stopped{len(asked)}", *ONE_ROW)

    def stop(rank: int, state: TrainState) -> None:
        if rank in asked and state.step == AT:
            os.kill(os.getpid(), signal.SIGTERM)

    (code, lines), (code_of_other, lines_of_other) = together(settings, stop)
    assert code == 143
    assert code_of_other == 0
    saved = [line for line in lines.splitlines() if line.startswith("stopped")]
    # A signal to the other is heard of before the next step.
    step = AT + 1 if 0 in asked else AT + 2
    assert len(saved) == 1
    assert saved[0].startswith(f"stopped at step {step} of 20, saved in ")
    assert "rank 0 has ended the command" in lines_of_other
    assert [path.name for path in (folder_of(settings) / "checkpoint").glob("step-*")] == [f"step-{step:08d}"]
    assert [code for code, _ in together(settings)] == [0, 0]
    assert losses(folder_of(settings)) == pytest.approx(losses(alone(*ONE_ROW)), abs=1e-5)


@pytest.mark.slow
def test_a_signal_while_one_is_in_its_first_step_ends_both(folder):
    """Rank 0 has done the step, and waits; the other, which may still compile, ends at once."""
    settings, path = settings_of(folder, "first", "attn=softmax"), folder / "first.pid"

    def stop(rank: int, state: TrainState) -> None:
        if rank == 0:
            path.write_text(str(os.getpid()))
            return

        def update(*arguments) -> None:
            time.sleep(1)
            os.kill(int(path.read_text()), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

        training_step.update = update

    (code, lines), (code_of_other, _) = together(settings, stop)
    assert (code, code_of_other) == (143, 143)
    assert lines.splitlines()[-1] == "stopped before a step was kept; the same command resumes"


@pytest.mark.parametrize("killed", [pytest.param(0, marks=SLOW), 1])
def test_a_process_that_is_killed_ends_the_other_with_a_line(killed, folder, alone):
    settings = settings_of(folder, f"killed{killed}", *ONE_ROW)

    def kill(rank: int, state: TrainState) -> None:
        if rank == killed and state.step == AT:
            os.kill(os.getpid(), signal.SIGKILL)

    ended = together(settings, kill)
    assert ended[killed][0] == -signal.SIGKILL
    code, lines = ended[1 - killed]
    assert code == 1
    (line,) = (line for line in lines.splitlines() if "error: " in line)
    assert line.endswith(
        "error: another of the 2 processes has ended; the same command resumes from the last checkpoint"
    )
    assert [code for code, _ in together(settings)] == [0, 0]
    assert losses(folder_of(settings)) == pytest.approx(losses(alone(*ONE_ROW)), abs=1e-5)


def test_a_wait_for_the_device_ends_with_the_process_that_it_waits_for(folder):
    """Wait as on a GPU, where a kernel waits for a process that was killed."""

    def act(rank: int, state: TrainState) -> None:
        if state.step == AT:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            groups.join(Ranks(rank=0, size=2), "cpu").wait_until(lambda: False)

    (code, lines), (code_of_other, _) = together(settings_of(folder, "waited", "attn=softmax"), act)
    assert (code, code_of_other) == (1, -signal.SIGKILL)
    assert "error: another of the 2 processes has ended; the same command resumes" in lines


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(groups, "STEP_TIMEOUT", timedelta(seconds=5))

    def sleep(rank: int, state: TrainState) -> None:
        if rank == 1 and state.step == AT:
            time.sleep(12)

    ended = together(settings_of(folder, "sleeps", "attn=softmax"), sleep)
    assert [code for code, _ in ended] == [1, 1]
    assert "error: another of the 2 processes does not answer (" in ended[0][1]


def test_a_training_that_diverges_ends_for_both_and_says_where(folder):
    settings = settings_of(folder, "diverged", "attn=softmax", "train.learning_rate=1e38", "train.warmup_steps=0")
    (code, lines), (code_of_other, lines_of_other) = together(settings)
    assert (code, code_of_other) == (1, 0), lines_of_other
    assert "; first in step " in lines
    assert [row.measurement.status for row in training_rows(folder_of(settings))] == ["diverged"]


def test_a_follower_with_another_corpus_ends_both(folder):
    settings = settings_of(folder, "other", "attn=softmax", f"data.path={folder / 'changing.txt'}")
    write_text(folder / "changing.txt", seed=1)
    given = variables(1, 2, 0)

    def prepare_another(settings, prepare=follow.prepare):
        assert os.environ["RANK"] == given["RANK"]
        write_text(folder / "changing.txt", seed=2)
        return prepare(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "prepare", prepare_another)
        (code, lines), (code_of_other, lines_of_other) = together(settings)
    assert (code, code_of_other) == (1, 1)
    assert re.fullmatch(r"process 1 of 2: error: trains \w{8}, and rank 0 \w{8}: .*\n", lines_of_other)
    assert lines.splitlines()[-1].startswith("error: another of the 2 processes has ended")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": None}, "WORLD_SIZE=2: set without RANK; torchrun --nproc_per_node=N sets them"),
        ({"MASTER_PORT": None, "LOCAL_RANK": ""}, "WORLD_SIZE=2: set without LOCAL_RANK, MASTER_PORT; torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
        ({"RANK": "2"}, "RANK=2: must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4: 2 of its processes are on this host; one model trains on one host"),
    ],
)
def test_variables_that_do_not_fit_are_named(changed, message, monkeypatch):
    set_variables(monkeypatch, {**variables(0, 2, 29500), **changed})
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        ranks_here()


def test_one_process_is_one_whoever_started_it(monkeypatch):
    assert ranks_here() == ALONE
    set_variables(monkeypatch, {"WORLD_SIZE": "1"})
    assert ranks_here() == ALONE
    set_variables(monkeypatch, variables(1, 2, 29500))
    assert ranks_here() == Ranks(rank=1, size=2)


@pytest.mark.slow
def test_four_processes_drop_out_and_end_early_as_one_does(folder, one_thread, monkeypatch):
    """A mask is a function of the row's number in the whole batch. Of a last step that comes nearer, on which the
    learning rates depend, the others hear from rank 0."""
    monkeypatch.setattr(Run, "new_end", lambda job, state, row: 14 if state.step == 10 else None)
    given = ["attn=softmax", "model.dropout=0.2", "train.decay_fraction=0.5"]
    alone, four = (settings_of(folder, f"early{size}", *given) for size in (1, 4))
    ended = together(four, size=4)
    assert [code for code, _ in ended] == [0] * 4, ended
    expected = losses(run(alone))
    assert len(expected) == 14
    assert losses(folder_of(four)) == pytest.approx(expected, abs=1e-5)


def set_variables(monkeypatch, given: Mapping[str, str | None]) -> None:
    for name, value in given.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_rows_are_shared_out_evenly_or_not_at_all(folder, monkeypatch):
    set_variables(monkeypatch, variables(0, 3, 29500))
    with pytest.raises(UserError, match=r"train\.batch_size=4: must be a multiple of the number of processes, 3$"):
        run(settings_of(folder, "uneven"))
    assert not (folder / "uneven").exists()


@pytest.mark.parametrize(
    ("device", "kinds", "message"),
    [
        ("cuda:1", ["H100"] * 2, "device=cuda:1: each of the 2 processes has a GPU of its own; device=cuda or auto"),
        ("cuda", ["H100"], "torchrun --nproc_per_node=2: this machine has 1 CUDA devices, and each process needs one"),
        ("auto", ["H100", "L4"], "torchrun: the GPUs differ (H100, L4); CUDA_VISIBLE_DEVICES=N,... chooses one kind"),
    ],
)
def test_every_process_needs_a_gpu(device, kinds, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(kinds))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: kinds[index])
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        groups.device_type_of(device, Ranks(rank=0, size=2))


def test_other_commands_refuse_several_processes_and_one_says_so(folder, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank, said in ((0, "error: torchrun: attnbench train runs in one process; "), (1, "")):
        set_variables(monkeypatch, variables(rank, 2, 29500))
        # The tests' own launcher is one of a command that does not say that it may be several.
        assert launched(monkeypatch, lambda settings: folder, words(folder)) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith(said)
        assert stderr.count("\n") == bool(said)
        # torchrun ends the others as soon as one has ended: that which speaks must have spoken.
        assert waited == ([] if said else [RANK_0_SECONDS])


@pytest.mark.slow
def test_torchrun_sweeps(folder):
    """The command itself: a job that diverges, one that does not, and both once more."""
    given = words(folder, *EVERY_STEP, "train.learning_rate=1e38,1e-3", "attn=softmax", outputs="swept")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "scripts/train.py"]
    for again in (False, True):
        done = subprocess.run([*command, "-m", *given], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.count("1 of 2 jobs failed:") == 1, done.stderr
        assert done.stderr.count("finished before, not trained again") == again
        assert done.stdout.count("text:small@") == 1


@pytest.mark.slow
def test_compiled_steps_are_the_same(folder, one_thread, monkeypatch):
    """Traced and differentiated as a whole, without the compiler's code, which two processes make for a minute."""

    def traced(function, *, dynamic, options, compile=torch.compile):
        return compile(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    plain, compiled = (
        settings_of(folder, f"compiled-{name}", "attn=softmax", "model.num_layers=1", f"train.compile={name}")
        for name in ("false", "true")
    )
    ended = together(compiled, counting(folder / "compiled.txt"))
    assert [code for code, _ in ended] == [0, 0], ended
    # The block's gradients are sent off before the embedding's is complete.
    assert begun_in(folder / "compiled.txt")[0] > 1
    assert losses(folder_of(compiled)) == pytest.approx(losses(run(plain)), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_two_gpus_train_as_one_does(compiled, folder):
    """Compiled, the reduction is in the captured step."""
    given = words(folder, *EVERY_STEP, "attn=softmax", f"train.compile={compiled}", "train.precision=float32")
    trained = []
    for name, start in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"])):
        outputs = folder / f"gpu-{name}-{compiled}"
        command = [sys.executable, *start, "scripts/train.py", *given, f"outputs_dir={outputs}", "device=cuda"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
        (path,) = outputs.glob("*/*/metrics.jsonl")
        trained.append(losses(path.parent))
    assert trained[1] == pytest.approx(trained[0], abs=1e-5)
