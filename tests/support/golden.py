"""Golden rows of a short training, a probe, a plan, an operator table and each mixer, to compare with this code's.

    python tests/support/golden.py --write

writes stored/golden.json again, which is done on purpose and in a commit of its own that says why numbers change.
"""

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from probe_settings import smoke_words
from small import MIXERS, bench_words, comparison_settings

from attnbench.bench.run import run_bench
from attnbench.cli.compose import CONF, compose, compose_mixers
from attnbench.cli.reading import read_bench
from attnbench.comparison import compare
from attnbench.comparison.execute import run
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.schema import PlanSettings
from attnbench.training.log import read_metrics

GOLDEN = Path(__file__).parents[1] / "stored" / "golden.json"
PARTS = ("training", "probe", "plan", "bench", "mixers")
TOLERANCE = 1e-5
"""Relative: versions of torch and processors round otherwise."""

COUNTED = {"scores": 2e-3, "seeds": 2e-3, "rate_window": 1e-2, "rate_sensitivity": 1e-2}
"""How far shares of a search may be apart: the last bits, which differ from one processor to the next, decide a tie.
Those of its rows, `selection`, are as far apart as `scores`, which they are averaged to."""

ERROR_BOUND = 1e-5
"""Largest error that the gate before an operator table may find in float32."""

CLOCKS = ("tokens_per_second", "generator_tokens_per_second", "train_seconds", "first_step_seconds", "seconds")
ELSEWHERE = ("schema", "device", "environment", "commit")
"""Columns of the machine and the commit."""

MODEL = [
    *("model.dim=32", "model.head_width=16", "model.feed_forward_width=48", "seq_len=32", "data=text"),
    *("train.num_epochs=null", "train.num_steps=8", "train.batch_size=4", "train.warmup_steps=2"),
    *("train.validation_interval_steps=4", "train.log_interval_steps=4", "logger=none", "device=cpu"),
]
BATCHES = {"perplexity_batch_tokens": 4096}
"""Enters the hash of perplexity's rows."""
MEANING = """
These rows are not those of tests/stored/golden.json. A refactoring changes none: then look for what it changed.
Where numbers change on purpose: raise the entry of NUMBERS_VERSION (attnbench/__init__.py) whose part it is, so that
results kept by earlier versions are not taken for new ones, then `python tests/support/golden.py --write`, look at the
difference, and commit both alone, with the reason. Where a hash alone moved: every result kept under the old one is
measured again; what must that be for?
"""


def text() -> str:
    """A corpus that needs no random numbers: words, lines, and a few characters beyond ASCII."""
    words = ["the", "cat", "sees", "a", "green", "tree", "naïve", "–", "and", "sleeps.\n"]
    return " ".join(words[(7 * index + index * index // 11) % len(words)] for index in range(1500))


def measure(folder: Path, parts: Iterable[str] = PARTS) -> dict[str, list[dict[str, Any]]]:
    (folder / "text.txt").write_text(text(), encoding="utf-8")
    measures = {"training": _training, "probe": _probe, "plan": _plan, "bench": _bench, "mixers": _mixers}
    before = torch.get_num_threads()
    # Sums of another order have other last digits.
    torch.set_num_threads(1)
    try:
        return {part: list(measures[part](folder)) for part in parts}
    finally:
        torch.set_num_threads(before)


def _training(folder: Path) -> Iterator[dict[str, Any]]:
    words = [*MODEL, f"data.path={folder / 'text.txt'}", f"outputs_dir={folder / 'training'}", "attn=gated_deltanet"]
    trained = run(compose([*words, "eval=[perplexity]", *smoke_words("perplexity", **BATCHES)]))
    yield from _rows(trained)
    for row in read_metrics(trained / "metrics.jsonl"):
        yield {name: "a clock's" if name in CLOCKS else value for name, value in row.items()}


def _probe(folder: Path) -> Iterator[dict[str, Any]]:
    words = [*MODEL, f"data.path={folder / 'text.txt'}", f"outputs_dir={folder / 'probe'}", "attn=linear"]
    trained = run(compose([*words, "eval=[recall]", *smoke_words("recall")]))
    yield from _rows(trained.parent / "cells")


def _plan(folder: Path) -> Iterator[dict[str, Any]]:
    plan = PlanSettings(
        name="golden",
        overrides=[
            *(word for word in MODEL if word != "logger=none" and not word.startswith("device=")),
            f"data.path={folder / 'text.txt'}",
            *smoke_words("copy", "perplexity", copy_learning_rates=[1e-2, 3e-2], **BATCHES),
        ],
        variants={"softmax": ["attn=softmax"], "wide": ["attn=gated_deltanet", "attn.negative_eigenvalues=true"]},
        evaluations=["copy", "perplexity"],
        seeds=[0],
        probe_seeds=[0, 1],
        num_search_seeds=1,
        learning_rates=[4e-3],
    )
    compared = compare.compare(comparison_settings(plan, folder / "plan"), compose)
    yield from _rows(compared)
    yield from json.loads((compared / "comparison.json").read_text(encoding="utf-8"))["rates"]


def _bench(folder: Path) -> Iterator[dict[str, Any]]:
    """Axes and status of an operator table, and whether its errors are small; no times."""
    words = ["bench=attention", "device=cpu", f"outputs_dir={folder / 'bench'}", *bench_words("attention")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("bench", words, return_hydra_config=True)
        measured = run_bench(read_bench(config, config.hydra), compose_mixers)
    for row in _results(measured):
        measurement = row.measurement
        content = {"variant": row.identity.variant, "metric": measurement.metric, "unit": measurement.unit}
        content |= {"settings": measurement.settings, "status": measurement.status}
        if measurement.metric == "max_error" and measurement.value is not None:
            content["error"] = "within bound" if measurement.value <= ERROR_BOUND else measurement.value
        yield content


def _mixers(folder: Path) -> Iterator[dict[str, Any]]:
    """Folder, with its hash, and losses of a short training of each mixer and of a hybrid."""
    hybrid = ["attn=hybrid", "attn.layers=[gated_deltanet,window]", "attn.options.window.window=8"]
    for attention in [*([f"attn={name}"] for name in MIXERS), hybrid]:
        # Most have more parameters at this width than can be matched.
        words = [*MODEL, f"data.path={folder / 'text.txt'}", f"outputs_dir={folder / 'mixers'}", "match=none"]
        trained = run(compose([*words, "model.num_layers=2", *attention]))
        log = read_metrics(trained / "metrics.jsonl")
        losses = {name: [row[name] for row in log if name in row] for name in ("loss", "nats_per_character")}
        yield {"run": trained.name, **losses}


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for row in _results(folder):
        content = {name: value for name, value in row.to_dict().items() if name not in ELSEWHERE}
        yield {**content, "value": "a clock's"} if row.measurement.metric in CLOCKS else content


def _results(folder: Path) -> Iterable[ResultRow]:
    return (row for path in sorted(folder.rglob("results/*.jsonl")) for row in read_results(path))


def differences(golden: dict[str, list[dict[str, Any]]], now: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Name each row that differs: numbers to TOLERANCE, everything else exactly."""
    lines = []
    for name in golden.keys() | now.keys():
        before, after = golden.get(name, []), now.get(name, [])
        if len(before) != len(after):
            lines.append(f"{name}: {len(before)} rows were golden, {len(after)} are there")
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            counted = COUNTED | ({"value": COUNTED["scores"]} if old.get("metric") == "selection" else {})
            lines += [f"{name}, row {index}: {line}" for line in _different("", old, new, counted)]
    return lines


def _different(path: str, old: Any, new: Any, counted: Mapping[str, float]) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _different(f"{path}.{name}".lstrip("."), old.get(name), new.get(name), counted)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _different(f"{path}[{index}]", *pair, counted)
    elif isinstance(old, float) and isinstance(new, float):
        apart = counted.get(path.partition(".")[0].partition("[")[0], 0.0)
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=apart):
            yield f"{path} was {old!r} and is {new!r}"
    elif old != new:
        yield f"{path} was {old!r} and is {new!r}"


def main() -> None:
    """Print what differs; with --write, replace the golden rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the golden rows by those measured now")
    write = parser.parse_args().write
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        now = json.loads(json.dumps(measure(Path(folder))))
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    print(*differences(golden, now), sep="\n")
    if write:
        lines = (f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in now.items())
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
