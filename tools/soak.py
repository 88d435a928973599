"""Runs killed again and again, compared with one that was never stopped: `make soak`.

Each sitting is a fork of this process, so that nothing is imported again. It gets SIGKILL, SIGTERM, SIGINT or SIGHUP
either at a random moment or, by a fault injected into its copy of the code, in the middle of writing, renaming or
removing a file. After each, every checkpoint that has its name must read; at the end, weights, optimizer, metrics and
results must equal those of a run that was never stopped, to the bit.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnbench.cli import compose as config
from attnbench.comparison import compare, workers
from attnbench.comparison.execute import run
from attnbench.comparison.plan import Comparison
from attnbench.evals.lib import solving
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.stack import run_stack
from attnbench.machine.signals import interruptible
from attnbench.model import stored
from attnbench.results import checkpoint_files
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.settings.errors import Interrupted
from attnbench.settings.schema import PlanSettings, RunSettings
from attnbench.training import checkpoint
from attnbench.training import log as training_log
from attnbench.training.checkpoint import TrainState
from attnbench.training.log import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from probe_settings import smoke_words
from small import comparison_settings, compose_once, in_this_process

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLOCKS = ("tokens_per_second", "generator_tokens_per_second", "train_seconds", "first_step_seconds", "peak_memory_mib")
OPTIMIZER = "optimizer.sha256"
"""File in a run's folder that these forks alone write: the final checkpoint has no optimizer."""
TINY = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=16"),
    *("train.num_epochs=null", "train.num_steps=24", "train.batch_size=4", "train.warmup_steps=2", "data=text"),
    *("train.log_interval_steps=1", "train.validation_interval_steps=6", "train.checkpoint_interval_seconds=0.02"),
]

Start = Callable[[Path], object]
"""One command, with its outputs in a folder."""


@dataclass(slots=True)
class Figures:
    """Counts of one kind of command."""

    num_runs: int = 0
    sittings: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def started(words: list[str], act: Callable[[RunSettings], object]) -> Start:
    """Compose once, so that a fork begins with the command's work."""
    settings = config.compose([*words, "logger=none", "device=cpu"])

    def start(outputs: Path) -> None:
        settings.outputs_dir = str(outputs)
        act(settings)

    return start


def training(text: Path) -> Start:
    return started([*TINY, f"data.path={text}", "eval=perplexity", "eval.perplexity.extrapolation=[2]"], run)


def probe(text: Path) -> Start:
    def train(settings: RunSettings) -> None:
        solving.CHECK_STEPS = 3
        job = prepare_probe(settings, settings.evaluations[0])[1][0].at(1e-2, settings.seed)
        job.train.checkpoint_interval_seconds = 0.0
        run_jobs([job])

    return started(["experiment=demo", "eval=copy", *smoke_words("copy")], train)


def stack(text: Path) -> Start:
    def train(settings: RunSettings) -> None:
        solving.CHECK_STEPS = 3
        first = prepare_probe(settings, settings.evaluations[0])[1][0]
        jobs = [first.at(rate, seed) for rate, seed in ((1e-2, 0), (3e-2, 0), (1e-2, 1))]
        for job in jobs:
            job.train.checkpoint_interval_seconds = 0.0
        run_stack(jobs, shares_device=False)

    return started(["experiment=demo", "eval=copy", *smoke_words("copy")], train)


def comparison(text: Path) -> Start:
    plan = PlanSettings(
        name="little",
        overrides=[
            *(*TINY, f"data.path={text}"),
            *smoke_words("copy", "perplexity", copy_learning_rates=[1e-2, 3e-2]),
        ],
        variants={"softmax": ["attn=softmax"], "plain": ["attn=linear"]},
        evaluations=["copy", "perplexity"],
        seeds=[0],
        probe_seeds=[0],
        learning_rates=[4e-3],
        num_workers=1,
    )
    Comparison(comparison_settings(plan, text.parent / "composed"), compose_once).settle()

    def start(outputs: Path) -> None:
        workers.run_in_processes = in_this_process
        compare.compare(comparison_settings(plan, outputs), compose_once)

    return start


KINDS: dict[str, Callable[[Path], Start]] = {
    "training": training,
    "probe": probe,
    "stack": stack,
    "compare": comparison,
}


def keep_optimizer_hash() -> None:
    """Write, in a fork, a hash of the optimizer's state beside the final checkpoint of every training."""

    def save_final(folder: Path, state: TrainState, record, save=checkpoint.save_final) -> None:
        digest = hashlib.sha256()
        for tensors in (state.first_moment, state.second_moment, state.update_count):
            for name, tensor in sorted(tensors.items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
        (folder.parent / OPTIMIZER).write_text(digest.hexdigest())
        save(folder, state, record)

    checkpoint.save_final = save_final


def inject_fault(action: str, call: int, number: signal.Signals) -> None:
    """Let a fork do half of its `call`th action of a kind, and then send it a signal."""
    left = [call]

    def is_now() -> bool:
        left[0] -= 1
        return left[0] == 0

    def half_saved(tensors, path, save=stored.save_file):
        save(tensors, path)
        if is_now():
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), number)
            save(tensors, path)

    def half_removed(path, is_own_file=checkpoint_files.is_own_file):
        # The files go in the order of their names: config.json is gone, and the weights are still there.
        if path.name == "state.json" and is_now():
            os.kill(os.getpid(), number)
        return is_own_file(path)

    def half_written(self, row):
        line = self._line(row)
        half = len(line) // 2 if is_now() else 0
        self._file.write(line[:half])
        if half:
            self._file.flush()
            os.kill(os.getpid(), number)
        self._file.write(line[half:])

    def before(act):
        def acting(*given, **named):
            if is_now():
                os.kill(os.getpid(), number)
            return act(*given, **named)

        return acting

    if action == "tensors":
        stored.save_file = half_saved
    elif action == "removal":
        checkpoint_files.is_own_file = half_removed
    elif action == "metrics row":
        training_log.MetricsLog.write = half_written
    else:
        setattr(os, action, before(getattr(os, action)))


FAULTS = {"tensors": 12, "removal": 8, "metrics row": 24, "fsync": 40, "rename": 10, "replace": 5}
"""Actions that a fault can be in, and the last call of a sitting that can have it."""


def sitting(start: Start, outputs: Path, log: Path, chance: random.Random | None, seconds: float) -> tuple[int, str]:
    """Run the command in one process; return its exit code, as subprocess has it, and how it was to be stopped."""
    number, delay, fault = signal.SIGKILL, None, None
    if chance is not None:
        number = chance.choice(SIGNALS)
        if chance.random() < 0.5:
            delay = chance.uniform(0.005, seconds)
        else:
            action = chance.choice([*FAULTS])
            fault = (action, chance.randint(1, FAULTS[action]), number)
    # Held until the fork can take one, as a script's process can before it does anything.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[1:])
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os._exit(child_exit_code(start, outputs, fault))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, number)
    _, status = os.waitpid(child, 0)
    how = f"{number.name} " + ("at a moment" if delay is not None else f"in {fault[0]}" if fault else "never")
    return os.waitstatus_to_exitcode(status), how


def child_exit_code(start: Start, outputs: Path, fault: tuple | None) -> int:
    """Run the command in a fork; return its exit code as a script would have it."""
    try:
        with interruptible("interrupted, as a script says where nothing else does"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            keep_optimizer_hash()
            if fault is not None:
                inject_fault(*fault)
            start(outputs)
    except Interrupted as interruption:
        return interruption.exit_code
    except BaseException:
        traceback.print_exc()
        return 2
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def check_left(outputs: Path) -> None:
    """Read every checkpoint that has its name, and every log but for a torn last line."""
    for state in outputs.rglob("checkpoint/[!.]*"):
        stored.read_files(state)
    for path in outputs.rglob("metrics.jsonl"):
        read_metrics(path)


def left_behind(outputs: Path) -> dict[str, object]:
    """Content that two equal runs share, by file."""
    content: dict[str, object] = {}
    for path in sorted(outputs.rglob("*")):
        name = path.relative_to(outputs).as_posix()
        if path.name == "metrics.jsonl":
            clocks = ("seconds", "tokens_per_second")
            content[name] = [{key: row[key] for key in row if key not in clocks} for row in read_metrics(path)]
        elif path.suffix == ".jsonl":
            rows = [row.measurement for row in read_results(path) if row.measurement.metric not in CLOCKS]
            # A stack that goes on has fewer trainings once some are done, and the same bits.
            settings = [{key: value for key, value in row.settings.items() if key != "stack"} for row in rows]
            content[name] = [(row.metric, row.value, json.dumps(own)) for row, own in zip(rows, settings, strict=True)]
        elif path.name == OPTIMIZER or path.match("checkpoint/final/weights.safetensors"):
            content[name] = path.read_bytes()
    return content


def soak(kind: str, num_stops: int, seed: int, folder: Path) -> Figures:
    """Stop commands of a kind `num_stops` times, and let each come to its end.

    Raises:
        AssertionError: something is not as if nothing had happened; `folder` has what is left and the log.
    """
    folder.mkdir(parents=True)
    text, log, chance = folder / "small.txt", folder / "log.txt", random.Random(seed)
    text.write_text(" ".join(random.Random(0).choices(["the", "cat", "sees", "a", "green", "tree"], k=800)))
    start, figures, begun = KINDS[kind](text), Figures(), time.perf_counter()
    code, _ = sitting(start, folder / "never", log, None, 0)
    assert code == 0, log.read_text()
    seconds, expected = time.perf_counter() - begun, left_behind(folder / "never")
    assert any(name.endswith(OPTIMIZER) for name in expected)
    while figures.stops.total() < num_stops:
        outputs = folder / f"run{figures.num_runs}"
        while True:
            # A run is stopped a few times and then left alone, for a sitting may be too short to save anything.
            is_left_alone = figures.stops.total() >= num_stops or chance.random() < 0.1
            code, how = sitting(start, outputs, log, None if is_left_alone else chance, seconds)
            figures.sittings += 1
            expected_codes = (0, 129, 130, 143, -signal.SIGKILL)
            assert code in expected_codes, f"{how}: {code}\n{log.read_text()[-3000:]}"
            check_left(outputs)
            if code == 0:
                break
            figures.stops[how] += 1
        left = left_behind(outputs)
        assert left.keys() == expected.keys(), (outputs, left.keys() ^ expected.keys())
        assert not [name for name in expected if left[name] != expected[name]], outputs
        shutil.rmtree(outputs)
        figures.num_runs += 1
    figures.seconds = time.perf_counter() - begun
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--stops", default="training=120,probe=30,stack=30,compare=20", help="how many of which command"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # Sums of another order have other last digits; and only a process of one thread may fork.
    torch.set_num_threads(1)
    for entry in given.stops.split(","):
        kind, _, number = entry.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            figures = soak(kind, int(number), given.seed, Path(folder) / kind)
        print(
            f"{kind}: {figures.stops.total()} stops, {figures.sittings} sittings, {figures.num_runs} runs to the end, "
            f"all to the bit as never stopped; {figures.seconds:.0f} s",
            flush=True,
        )
        for how, count in sorted(figures.stops.items()):
            print(f"  {count:4}  {how}")


if __name__ == "__main__":
    main()
