"""Time what a grid of a probe's trainings costs: benchmarks/grid_cost.py [CASE ...], on a GPU.

Twenty trainings a case, four learning rates × five seeds at equal steps (conf/plan/grid_cost.yaml), in columns, each a
command in a new process with empty compiler caches: `before`, eight workers of the code in `--before`, a tree of commit
d988206, which knew no stacks; `one by one`, one worker; `five workers`, which take turns on the device; and `new`,
`plan.stack=auto`. Then zoology's own loop at (256,16), whose second run reads the sequences of the first, and
plan=published with one seed, stacks by four workers, with empty caches and again with filled ones.

Prints a line a column as soon as it has run, and in the end the table. Columns are kept in OUTPUTS/grid_cost.jsonl,
caches in OUTPUTS/work, and the same command resumes behind them; those of one case belong on one machine, with nothing
beside them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
PLAN = yaml.safe_load((ROOT / "conf/plan/grid_cost.yaml").read_text())
SMALL = ["eval.recall.preset=small", "eval.recall.cells=null", "eval.recall.widths=null"]
CASES = {
    "small": ("recall", "softmax", SMALL),
    "copy": ("copy", "softmax", []),
    "recall": ("recall", "softmax", []),
    "recall_gated_deltanet": ("recall", "gated_deltanet", []),
    "recall_large": ("recall", "linear", ["eval.recall.cells=[[512,64]]", "eval.recall.widths=[128]"]),
}
"""Evaluation, mixer, and overrides behind the plan's."""

COLUMNS = {
    "before": ["plan.num_workers=8"],
    "one by one": ["plan.num_workers=1", "plan.stack=1"],
    "five workers": ["plan.num_workers=5", "plan.stack=1"],
    "new": ["plan.num_workers=1", "plan.stack=auto"],
}
ZOOLOGY, PUBLISHED = "zoology", "published"
ZOOLOGY_STEPS = 200
"""Steps of an epoch; its two have as many as a training of recall in the plan."""


class Column(NamedTuple):
    """One command to time."""

    case: str
    name: str
    command: list[str]
    tree: Path
    """Whose code runs; the command's folder."""
    place: Path
    """Folder of its caches and, in outputs/, of what it writes."""
    is_first: bool = True
    """Begin with an empty place; otherwise with what the column before it has left in its caches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES, ZOOLOGY, PUBLISHED], help="default: all")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=[*COLUMNS], help="of a case; default: all")
    parser.add_argument("--before", type=Path, help="a tree of d988206: git worktree add BEFORE d988206")
    parser.add_argument("--zoology", type=Path, help="zoology's repository")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/grid_cost"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="of each training of recall, to try it out; default: the plan's")
    given = parser.parse_args()
    if unknown := set(given.cases) - {*CASES, ZOOLOGY, PUBLISHED}:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join([*CASES, ZOOLOGY, PUBLISHED])}")
    given.outputs.mkdir(parents=True, exist_ok=True)
    kept = given.outputs / "grid_cost.jsonl"
    for column in columns(given, (given.outputs / "work").resolve()):
        if (column.case, column.name) not in {(row["case"], row["column"]) for row in read(kept)}:
            row = timed(column)
            print(json.dumps(row), flush=True)
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(read(kept)))


def columns(given: argparse.Namespace, folder: Path) -> Iterator[Column]:
    """Yield what is asked for and can run; say of the rest why not."""
    for case in given.cases:
        if case == PUBLISHED:
            words = ["plan=published", "plan.seeds=[0]", "plan.probe_seeds=[0]", "plan.stack=auto"]
            for name in ("empty caches", "filled caches"):
                place = folder / case
                yield Column(case, name, command(words, given.device, place), ROOT, place, name == "empty caches")
        elif case == ZOOLOGY:
            if given.zoology is None:
                print(f"{case}: not run without --zoology", flush=True)
                continue
            program = [str(ROOT / "benchmarks/zoology_loop.py"), str(given.zoology.resolve()), "256", "16"]
            words = [*program, str(ZOOLOGY_STEPS), "--cache", str(folder / case / "sequences")]
            for name in ("sequences made", "sequences read"):
                told = [sys.executable, *words]
                yield Column(case, name, told, ROOT, folder / case, name == "sequences made")
        else:
            for name in given.columns:
                words = COLUMNS[name]
                tree = ROOT if name != "before" else given.before and given.before.resolve()
                if tree is None:
                    print(f"{case}, {name}: not run without --before", flush=True)
                    continue
                plan, place = f"grid_cost_{case}", folder / case / name.replace(",", "").replace(" ", "_")
                plans = folder / ("plans_before" if name == "before" else "plans")
                write_plan(case, plans / "plan" / f"{plan}.yaml", is_before=name == "before", steps=given.steps)
                told = [f"--config-dir={plans}", f"plan={plan}", f"plan.only=[{CASES[case][0]}]", *words]
                yield Column(case, name, command(told, given.device, place), tree, place)


def command(words: list[str], device: str, place: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "attnbench", "compare", *words),
        *(f"device={device}", "logger=none", "report=false", f"outputs_dir={place / 'outputs'}"),
    ]


def write_plan(case: str, path: Path, *, is_before: bool, steps: int | None) -> None:
    """Write plan=grid_cost of one case; before there were stacks a recipe was one of a plan's overrides."""
    _, mixer, overrides = CASES[case]
    variants = {name: words for name, words in PLAN["variants"].items() if name.startswith(f"{mixer}_")}
    told = [word for word in PLAN["overrides"] if not (overrides and word.startswith("eval.recall.cells="))]
    more = [f"eval.recall.num_steps={steps}"] if steps is not None else []
    told = [word for word in told if not (more and word.startswith("eval.recall.num_steps="))]
    plan: dict[str, Any] = PLAN | {"variants": variants, "overrides": [*told, *overrides, *more]}
    if is_before:
        recipe = plan.pop("recipe")
        plan["overrides"] = [f"recipe={recipe}", *plan["overrides"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plan, sort_keys=False))


def timed(column: Column) -> dict[str, Any]:
    """Run a command, of which nothing is left by one that was cut off; return its seconds, and of zoology's loop what
    it prints.

    Raises:
        SystemExit: it failed.
    """
    shutil.rmtree(column.place if column.is_first else column.place / "outputs", ignore_errors=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(column.tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRITON_CACHE_DIR": str(column.place / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(column.place / "inductor"),
    }
    began = time.perf_counter()
    done = subprocess.run(column.command, cwd=column.tree, env=environment, capture_output=True, text=True)
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode:
        sys.exit(f"{column.case}, {column.name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    parts = json.loads(done.stdout.strip().splitlines()[-1]) if column.case == ZOOLOGY else {}
    return {"case": column.case, "column": column.name, "seconds": seconds} | parts


def read(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return the seconds of every case, a line each; of zoology's loop those of twenty runs too."""
    lines = ["| case | " + " | ".join(COLUMNS) + " |", "| --- |" + " --: |" * len(COLUMNS)]
    seconds = {(row["case"], row["column"]): row["seconds"] for row in rows}
    for case in CASES:
        values = [seconds.get((case, name)) for name in COLUMNS]
        lines.append(f"| {case} | " + " | ".join("" if value is None else f"{value:.0f}" for value in values) + " |")
    for row in rows:
        if row["case"] == ZOOLOGY:
            lines.append(
                f"\n{ZOOLOGY}, {row['column']}: {row['seconds']} s a run, {20 * row['seconds']:.0f} for twenty"
            )
        elif row["case"] == PUBLISHED:
            lines.append(f"\nplan=published, one seed, {row['column']}: {row['seconds'] / 60:.1f} minutes")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
