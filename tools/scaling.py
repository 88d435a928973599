"""One model trained by all GPUs of this host, measured: python tools/scaling.py FOLDER, at most ten minutes.

Every line is printed as soon as it is known, and FOLDER/scaling.json has them all. Parts, in this order:

    speed     tokens per second of each mixer on 1, 2, 4 ... GPUs by torchrun: 12 layers of 768, 8 × 2,048 tokens a GPU.
              With --profile also three steps under the profiler after each training.
    apart     the same training on every GPU at the same time, each alone: the speed that no reduction slows.
    losses    60 steps in float32 on all GPUs against one GPU at the same batch: the largest difference of a step.
    killed    a process is killed: seconds until the others say so; the same command then trains to the end.
    compare   a plan of many probes on all GPUs against one: seconds, and the largest difference of a score.
    variants  tokens per second of the first mixer on all GPUs under other settings of NCCL and other buckets.

A part that fails, or that --minutes do not allow, is named, the next one begins, and the exit code is 1.
`--device cpu --tiny` tries the program out by gloo.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnbench.bench.profiling.recording import Recording, is_operator, record, shortened
from attnbench.machine.environment import source_commit
from attnbench.results.row_files import read_results
from attnbench.training.log import read_metrics

ROOT = Path(__file__).parents[1]
TRAIN = [
    *("experiment=scaling", "data=text", "logger=none", "eval=[]", "train.num_epochs=null", "train.warmup_steps=20"),
    "train.validation_characters=5000",
]
MODEL = [
    *("model.name=scaling", "model.dim=768", "model.num_layers=12", "model.head_width=64"),
    *("model.feed_forward_width=2048", "seq_len=2048"),
]
TINY = [
    *("model.name=scaling", "model.dim=32", "model.num_layers=2", "model.head_width=16"),
    *("model.feed_forward_width=64", "seq_len=32"),
]
PLAN = """\
recipe: equipped
overrides: [data=embedded, {recall}, eval.recall.fixed_steps=true, "eval.recall.learning_rates=[3e-3]"]
variants: {{softmax: [attn=softmax], linear: [attn=linear], gated_deltanet: [attn=gated_deltanet]}}
evaluations: [recall]
rank: []
seeds: [0]
probe_seeds: {seeds}
learning_rates: [1e-3]
num_workers: {workers}
"""
RECALL = '"eval.recall.cells=[[256,16]]", eval.recall.num_steps=400'
SMALL_RECALL = (
    'eval.recall.preset=small, "eval.recall.cells=[[32,4]]", "eval.recall.widths=[32]", eval.recall.batch_size=16, '
    "eval.recall.num_steps=20, eval.recall.num_test=50"
)
ONE_BUCKET = f"BUCKET_ELEMENTS={2**62}"
VARIANTS = [
    "",
    ONE_BUCKET,
    "train.log_interval_steps=50",
    "NCCL_MAX_CTAS=8",
    "NCCL_CGA_CLUSTER_SIZE=0",
    "TORCH_NCCL_HIGH_PRIORITY=1",
    "NCCL_MAX_CTAS=8 NCCL_CGA_CLUSTER_SIZE=0 TORCH_NCCL_HIGH_PRIORITY=1",
    f"BUCKET_ELEMENTS={2**24}",
    "NCCL_MAX_CTAS=4",
    "NCCL_GRAPH_MIXING_SUPPORT=0",
]
"""Settings of a training, and variables of the environment: NCCL's, and BUCKET_ELEMENTS, which is the constant of
machine/group.py. With one bucket the reduction follows the backward pass."""
LAST_WORDS = ("processes has ended", "stopped at step")
"""In the line of a process whose peer was killed: the second after torchrun's signal, which may come first."""
NUM_KERNELS, PROFILED_STEPS = 15, 3
LOSSES_RATE = 1e-4
"""Learning rate of the losses. At 2e-3 Adam's first steps, whose size hardly depends on the gradient, amplify rounding:
on two H200 losses then differ by 0.013 (flash) and 0.0001 (gated_deltanet) within 60 steps, at 1e-4 by 5e-7."""
LEAST_SECONDS, MOST_SECONDS = 30, 150
"""Time without which no command is begun; time after which one that hangs is ended."""


class FailedError(Exception):
    """A command that failed, with its last lines, or for which there is no time."""


class Measured:
    """Prints measurements, keeps them in the file, and runs commands.

    Args:
        given: the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.folder = given.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device, self.tiny, self.profile, self.mixers = given.device, given.tiny, given.profile, given.mixers
        self.variants = given.variants
        self.size = given.gpus or (torch.cuda.device_count() if self.device == "cuda" else 2)
        self.end = time.monotonic() + 60 * given.minutes
        self.num_commands = 0
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        self.lines: list[dict[str, Any]] = []
        self.text = self.folder / "text.txt"
        drawn = random.Random(0)
        words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(5_000)]
        self.text.write_text(" ".join(drawn.choices(words, k=20_000 if self.tiny else 2_000_000)) + "\n")
        commit, _ = source_commit(ROOT)
        self.say("machine", device=name, size=self.size, torch=torch.__version__, commit=commit, tiny=self.tiny)

    def say(self, part: str, **values: Any) -> None:
        """Print a line and keep it."""
        self.lines.append({"part": part, **values})
        (self.folder / "scaling.json").write_text(json.dumps(self.lines, indent=1) + "\n")
        kernels, _ = values.pop("kernels", []), values.pop("differences", None)
        print(f"{part:<9}", *(f"{name} {_short(value)}" for name, value in values.items()), flush=True)
        for kernel in kernels:
            print(f"{'':<9} {kernel['milliseconds']:8.3f} ms {kernel['calls']:5.0f} × {kernel['name']}", flush=True)

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def start(
        self, words: Sequence[str], *, size: int = 1, first: int = 0, variables: Mapping[str, str] = {}
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start attnbench, by torchrun if `size` processes train; return it and the file of its output.

        Args:
            first: number of the first GPU.
            variables: of the environment, also read by `train_here`.
        """
        if self.seconds_left() < LEAST_SECONDS:
            raise FailedError("no time left")
        self.num_commands += 1
        log = self.folder / f"{self.num_commands}.txt"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"] if size > 1 else []
        program = [__file__, "--train"] if words[0] == "train" else ["-m", "attnbench"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        if self.device == "cuda":
            count = self.size if words[0] == "compare" else size
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + count)))
        else:
            environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, *torchrun, *program, *words, f"device={self.device}"]
        with log.open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT), log

    def finish(self, *started: tuple[subprocess.Popen[bytes], Path]) -> None:
        """Wait for commands; end them all where their time is up.

        Raises:
            FailedError: a command failed, or the time is up.
        """
        try:
            for process, log in started:
                if process.wait(max(1.0, min(self.seconds_left(), MOST_SECONDS))):
                    raise FailedError(f"{log}: {' | '.join(log.read_text(errors='replace').splitlines()[-6:])}")
        except subprocess.TimeoutExpired:
            raise FailedError(f"{started[0][1]}: its time is up") from None
        finally:
            for process, _ in started:
                # torchrun and attnbench end their processes.
                process.terminate()
                process.wait()

    def training(self, outputs: Path, mixers: Sequence[str], rows: int, steps: int, *more: str) -> list[str]:
        """Return words that train each mixer in turn, in one command."""
        return [
            *("train", "-m", *TRAIN, f"attn={','.join(mixers)}", f"data.path={self.text}", f"outputs_dir={outputs}"),
            *(f"train.num_steps={steps}", f"train.validation_interval_steps={steps}", f"train.batch_size={rows}"),
            *more,
        ]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) and value < 1e4 else value


def _speeds(outputs: Path) -> dict[str, float]:
    """Read tokens per second by mixer."""
    rows = [row for path in outputs.glob("*/*/results/training-*.jsonl") for row in read_results(path)]
    return {
        row.identity.variant: row.measurement.value
        for row in rows
        if row.measurement.metric == "tokens_per_second" and row.measurement.value is not None
    }


def _losses(outputs: Path) -> dict[str, list[float]]:
    """Read the losses of all steps by mixer."""
    found = {}
    for path in outputs.glob("*/*/results/training-*.jsonl"):
        rows = read_metrics(path.parents[1] / "metrics.jsonl")
        found[read_results(path)[0].identity.variant] = [row["loss"] for row in rows if "loss" in row]
    return found


@contextmanager
def clocks() -> Iterator[dict[str, Any]]:
    """Fill a dictionary with the clocks (MHz) and powers (W) of the GPUs, medians of the samples of busy ones."""
    found: dict[str, Any] = {}
    query = "--query-gpu=index,utilization.gpu,clocks.sm,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--loop-ms=200"]
    with tempfile.TemporaryFile("w+") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            yield found
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
        samples: dict[str, list[tuple[float, float]]] = {}
        file.seek(0)
        for line in file.read().splitlines():
            try:
                gpu, busy, clock, power = line.split(", ")
                if float(busy) >= 95:
                    samples.setdefault(gpu, []).append((float(clock), float(power)))
            except ValueError:
                # Cut off, or a value that this GPU does not give.
                continue
        for gpu, pairs in sorted(samples.items()):
            found[f"gpu{gpu}"] = {
                "mhz": statistics.median(clock for clock, _ in pairs),
                "watts": statistics.median(power for _, power in pairs),
            }


def speed(measured: Measured) -> None:
    size, alone = 1, {}
    while size <= measured.size:
        # A command each: once used, the profiler slows a process.
        for mixer in measured.mixers:
            outputs = measured.folder / f"speed-{mixer}-{size}"
            profile = outputs.with_name(f"{outputs.name}-profile.json")
            words, variables = _fast(measured, outputs, size, [mixer]), {"PROFILE": str(profile)}
            with clocks() as found:
                measured.finish(measured.start(words, size=size, variables=variables if measured.profile else {}))
            value = _speeds(outputs)[mixer]
            share = value / (size * alone.setdefault(mixer, value))
            measured.say("speed", gpus=size, mixer=mixer, tokens_per_second=value, of_perfect=share, **found)
            if measured.profile:
                milliseconds = json.loads(profile.read_text())
                kernels = milliseconds.pop("kernels")
                measured.say("profile", gpus=size, mixer=mixer, milliseconds=milliseconds, kernels=kernels)
        size *= 2


def _fast(measured: Measured, outputs: Path, size: int, mixers: Sequence[str], times: int = 1) -> list[str]:
    rows, steps = (4, 100) if measured.tiny else (8, 400)
    return measured.training(outputs, mixers, size * rows, times * steps, *(TINY if measured.tiny else MODEL))


def apart(measured: Measured) -> None:
    folders = [measured.folder / f"apart{gpu}" for gpu in range(measured.size)]
    with clocks() as found:
        started = [
            measured.start(_fast(measured, folder, 1, measured.mixers), first=gpu) for gpu, folder in enumerate(folders)
        ]
        measured.finish(*started)
    speeds = [_speeds(folder) for folder in folders]
    together = {
        line["mixer"]: line["tokens_per_second"]
        for line in measured.lines
        if line["part"] == "speed" and line["gpus"] == measured.size
    }
    for mixer in speeds[0]:
        values = [speed[mixer] for speed in speeds]
        share = {"together_of_slowest": together[mixer] / (measured.size * min(values))} if mixer in together else {}
        measured.say("apart", mixer=mixer, tokens_per_second=values, **share, **found)


def losses(measured: Measured) -> None:
    # On one GPU micro-batches of one GPU's share, which are compiled once for both.
    exact = ["train.precision=float32", "train.log_interval_steps=1", "train.micro_batch_size=4"]
    exact.append(f"train.learning_rate={LOSSES_RATE}")
    exact += TINY if measured.tiny else ["seq_len=512"]
    found = []
    for size in (1, measured.size):
        outputs = measured.folder / f"losses{size}"
        words = measured.training(outputs, measured.mixers, 4 * measured.size, 60, *exact)
        measured.finish(measured.start(words, size=size))
        found.append(_losses(outputs))
    for mixer, values in found[0].items():
        differences = [abs(one - other) for one, other in zip(values, found[1][mixer], strict=True)]
        values = {"steps": len(values), "last": values[-1], "largest_difference": max(differences)}
        measured.say("losses", mixer=mixer, rate=LOSSES_RATE, **values, differences=differences)


def killed(measured: Measured) -> None:
    outputs = measured.folder / "killed"
    words = _fast(measured, outputs, measured.size, measured.mixers[:1], times=3)
    words.append(f"train.checkpoint_interval_seconds={1 if measured.tiny else 5}")
    process, log = measured.start(words, size=measured.size)
    try:
        while not list(outputs.glob("*/*/checkpoint/step-*/state.json")):
            time.sleep(0.05)
            if process.poll() is not None or measured.seconds_left() < LEAST_SECONDS:
                raise FailedError(f"{log}: no checkpoint before its end")
        os.kill(_rank(process.pid, measured.size - 1), signal.SIGKILL)
        began, said = time.monotonic(), None
        while process.poll() is None and measured.seconds_left() > 1:
            if said is None and any(words in log.read_text(errors="replace") for words in LAST_WORDS):
                said = time.monotonic() - began
            time.sleep(0.01)
        ended, code = time.monotonic() - began, process.returncode
    finally:
        process.terminate()
        process.wait()
    again = measured.start(words, size=measured.size)
    measured.finish(again)
    (resumed,) = (line for line in again[1].read_text().splitlines() if "resumes at step" in line)
    is_final = bool(list(outputs.glob("*/*/checkpoint/final")))
    line = resumed.partition("resumes ")[2].partition(":")[0]
    measured.say("killed", line_after_s=said, ended_after_s=ended, exit_code=code, resumed=line, is_final=is_final)


def _rank(pid: int, rank: int) -> int:
    """Return the process of this rank among the children of torchrun."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    given = f"RANK={rank}".encode()
    (found,) = (int(child) for child in children if given in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"))
    return found


def compare(measured: Measured) -> None:
    conf = measured.folder / "conf" / "plan"
    conf.mkdir(parents=True, exist_ok=True)
    # On a CPU one command has a worker, the other two: it has no devices to share the runs out to.
    on_gpus = measured.device == "cuda"
    recall, seeds = (SMALL_RECALL, 1) if measured.tiny else (RECALL, 8)
    plan = PLAN.format(recall=recall, seeds=[*range(seeds)], workers=2 if on_gpus else 1)
    (conf / "scaling.yaml").write_text(plan)
    scores, seconds = [], []
    for name in ("one", "all"):
        outputs = measured.folder / f"compare-{name}"
        many = [f"plan.devices={name}"] if on_gpus else [f"plan.num_workers={2 if name == 'all' else 1}"]
        words = ["compare", f"--config-dir={conf.parent}", "plan=scaling", *many, "logger=none", "report=false"]
        began = time.monotonic()
        measured.finish(measured.start([*words, f"outputs_dir={outputs}"]))
        seconds.append(time.monotonic() - began)
        scores.append(_scores(outputs))
    if scores[0].keys() != scores[1].keys():
        raise FailedError("other scores")
    largest = max(abs(scores[1][key] - value) for key, value in scores[0].items())
    values = {"one_s": seconds[0], "all_s": seconds[1], "times": seconds[0] / seconds[1]}
    measured.say("compare", scores=len(scores[0]), **values, largest_difference=largest)


def _scores(outputs: Path) -> dict[Any, float]:
    rows = [row for path in outputs.rglob("results/recall-*.jsonl") for row in read_results(path)]
    return {
        (row.identity.variant, row.identity.seed, json.dumps(row.measurement.settings, sort_keys=True, default=str)): (
            row.measurement.value
        )
        for row in rows
        if row.measurement.metric == "accuracy" and row.measurement.value is not None
    }


def variants(measured: Measured) -> None:
    for number, variant in enumerate(measured.variants):
        outputs, given = measured.folder / f"variant{number}", variant.split()
        words = _fast(measured, outputs, measured.size, measured.mixers[:1])
        words += [word for word in given if word.startswith("train.")]
        variables = dict(word.split("=") for word in given if not word.startswith("train."))
        with clocks() as found:
            measured.finish(measured.start(words, size=measured.size, variables=variables))
        for mixer, value in _speeds(outputs).items():
            measured.say("variants", mixer=mixer, tokens_per_second=value, given=variant or "nothing", **found)


PARTS: dict[str, Callable[[Measured], None]] = {
    part.__name__: part for part in (speed, apart, losses, killed, compare, variants)
}


def train_here(words: list[str]) -> None:
    """Run attnbench train in this process, with the size of buckets and the profile that the environment asks for."""
    from attnbench.cli import commands
    from attnbench.machine import group
    from attnbench.training import follow, loop, run

    group.BUCKET_ELEMENTS = int(os.environ.get("BUCKET_ELEMENTS", group.BUCKET_ELEMENTS))
    path, taken = os.environ.get("PROFILE"), []

    def stepper(*given: Any, make: Callable[..., Any] = loop.stepper, **how: Any) -> Any:
        taken[:] = [make(*given, **how)]
        return taken[0]

    def train(state: Any, batches: Any, *given: Any, whole: Callable[..., None] = loop.train, **how: Any) -> None:
        whole(state, batches, *given, **how)
        # All processes are here, after their last step.
        batch, rate = batches(state.step - 1), torch.zeros((), device=next(state.model.parameters()).device)
        recording = record(lambda: taken[0](batch, rate), rate.device, num_calls=PROFILED_STEPS, detailed=False)
        if path and os.environ.get("RANK", "0") == "0":
            Path(path).write_text(json.dumps(summary(recording)))

    if path:
        loop.stepper, run.train, follow.train = stepper, train, train
    sys.argv = ["attnbench", *words]
    commands.main()


def summary(recording: Recording) -> dict[str, Any]:
    """Return milliseconds of a step: its longest kernels, and the reduction beside other kernels and alone."""
    on_cpu = recording.device_type == "cpu"
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recording.profiler.events() or ()
        if is_operator(event) == on_cpu and not event.is_user_annotation
    ]
    lines = recording.lines() if on_cpu else recording.kernels()
    kernels = [(shortened(line.name), line.milliseconds, line.calls) for line in lines[:NUM_KERNELS]]
    return {
        **{name: microseconds / 1e3 / PROFILED_STEPS for name, microseconds in shares(spans).items()},
        # Kernels that run beside others last longer.
        "others_in_sum": sum(line.milliseconds for line in lines if not is_reduction(line.name)) / PROFILED_STEPS,
        "kernels": [
            {"name": name, "milliseconds": milliseconds / PROFILED_STEPS, "calls": calls / PROFILED_STEPS}
            for name, milliseconds, calls in kernels
        ],
    }


def shares(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Divide the time from the first start to the last end by names, starts and ends of kernels on all streams."""
    reduced = union((start, end) for name, start, end in spans if is_reduction(name))
    others = union((start, end) for name, start, end in spans if not is_reduction(name))
    busy = union([*reduced, *others])
    sum_time, other_time, busy_time = (sum(end - start for start, end in found) for found in (reduced, others, busy))
    whole = busy[-1][1] - busy[0][0]
    overlapped = sum_time + other_time - busy_time
    return {"whole": whole, "idle": whole - busy_time, "reduction": sum_time, "reduction_overlapped": overlapped}


def is_reduction(name: str) -> bool:
    return "nccl" in name.lower() or "allreduce" in name or name == "gloo:all_reduce"


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that overlap, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets scaling.json and all outputs; new or empty")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[*PARTS], help="default: all")
    parser.add_argument("--mixers", type=lambda text: text.split(","), default=["flash", "gated_deltanet"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="of the part: 'NCCL_MAX_CTAS=2' '...'")
    parser.add_argument("--minutes", type=float, default=9, help="default: 9")
    parser.add_argument("--gpus", type=int, help="default: all of this host; on a CPU 2 processes")
    parser.add_argument("--profile", action="store_true", help="a step's longest kernels, and its reduction")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program out")
    given = parser.parse_args()
    if unknown := set(given.parts) - {*PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if any(given.folder.glob("*")):
        parser.error(f"{given.folder}: is not empty; runs there would not be made again")
    measured, failed = Measured(given), False
    for name in given.parts:
        try:
            PARTS[name](measured)
        except Exception as error:
            failed = True
            measured.say(name, failed=f"{type(error).__name__}: {error}")
    raise SystemExit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_here(sys.argv[2:])
    else:
        main()
