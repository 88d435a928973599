"""Time an operator's kernels under other entries of their table LAUNCH, on a GPU.

    python tools/tune_launches.py kda 128,256,4,64 chunk.num_warps=4,8 gradient.num_warps=4,8 gradient.num_stages=1,2

Every combination of one kernel's values is measured with the other kernels at their entries; without values the table
is, as it stands. All are compiled first, by as many processes as there are cores; then each is measured by a process
alone: microseconds of every kernel in one forward and backward pass in bfloat16, by torch's profiler, and the largest
error beside the definition in float64.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from attnbench.bench.base import Conditions
from attnbench.bench.library_operators import Example, OperatorPasses
from attnbench.bench.operators.gate import GateError
from attnbench.bench.operators.library import OPERATORS, Shape
from attnbench.bench.operators.roofline import Ceilings
from attnbench.ops.delta.triton import delta_choice as delta_rule_choice
from attnbench.ops.diagonal.triton import diagonal_launch
from attnbench.ops.scalar.triton import scalar_launch as scalar_decay_launch

Entry = dict[str, int]
TABLES: dict[str, dict[str, Entry]] = {
    "retention": scalar_decay_launch.LAUNCH,
    "simple_gla": scalar_decay_launch.LAUNCH,
    "mamba2": scalar_decay_launch.LAUNCH,
    "gla": diagonal_launch.LAUNCH,
    "kda": diagonal_launch.LAUNCH,
    "gated_delta_rule": delta_rule_choice.LAUNCH,
    "narrow_gated_delta_rule": delta_rule_choice.NARROW_LAUNCH,
}
"""Tables by operator; that of narrow heads by its own name."""
NUM_PASSES = 20


def main() -> None:
    """Compile and measure all combinations, or, called by itself, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=TABLES)
    parser.add_argument("shape", help="sequences,positions,heads,channels a head")
    parser.add_argument("values", nargs="*", help="KERNEL.OPTION=VALUE,VALUE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    batch, length, heads, width = map(int, given.shape.split(","))
    shape = Shape(batch, length, heads, heads, width)
    if given.one is not None:
        print(json.dumps(measure(given.operator, shape, json.loads(given.one))))
        return
    choices = list(combinations(given.values, TABLES[given.operator]))
    command = [sys.executable, __file__, given.operator, given.shape]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda choice: run(command, choice), choices))
    for kernel, entry in choices:
        print(f"{kernel} {entry}: {run(command, (kernel, entry))}", flush=True)


def combinations(values: list[str], table: dict[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """A kernel and its whole entry each; the first is what stands in the table, and without values all there is."""
    given: dict[str, dict[str, list[int]]] = {}
    for word in values:
        place, _, numbers = word.partition("=")
        kernel, _, option = place.partition(".")
        given.setdefault(kernel, {})[option] = [int(number) for number in numbers.split(",")]
    first = next(iter(given or table))
    yield first, table[first]
    for kernel, options in given.items():
        for chosen in itertools.product(*options.values()):
            entry = table[kernel] | dict(zip(options, chosen, strict=True))
            if entry != table[kernel]:
                yield kernel, entry


def run(command: list[str], choice: tuple[str, Entry]) -> str:
    """One combination in a process of its own, whose kernels' failures are its own too."""
    done = subprocess.run([*command, "--one", json.dumps(choice)], capture_output=True, text=True)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]


def measure(name: str, shape: Shape, choice: tuple[str, Entry]) -> dict[str, float | str]:
    """Microseconds of every kernel, of all of them, and the error."""
    kernel, entry = choice
    TABLES[name][kernel] = entry
    conditions = Conditions(
        device=torch.device("cuda"), precision="bfloat16", ceilings=Ceilings(1, 1), mixers=lambda names: []
    )
    operator = OPERATORS[name.removeprefix("narrow_")]
    example = Example(operator, shape, conditions)
    passes = OperatorPasses(operator.functions["triton"](shape, conditions), example)
    try:
        error: float | str = float(f"{example.largest_error(passes.results(), 'bfloat16'):.2g}")
    except GateError as wrong:
        error = str(wrong)
    # Until the clock has risen.
    for _ in range(3):
        passes.total()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_PASSES):
            passes.total()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / NUM_PASSES for event in profile.key_averages()}
    longest = dict(sorted(times.items(), key=lambda item: -item[1])[:8])
    return {key[:40]: round(time, 1) for key, time in longest.items()} | {
        "all": round(sum(times.values()), 1),
        "error": error,
    }


if __name__ == "__main__":
    main()
