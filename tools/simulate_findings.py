"""Power of findings by simulation, as a Markdown table: `python tools/simulate_findings.py [name ...]`.

Each variant's scores are drawn about the mean and with the spread that its yaml assumes, normal and cut to the metric's
range; the tests are those of attnbench/verdict. Findings whose yaml assumes no scores are left out.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import OmegaConf

from attnbench.cli.compose import CONF
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.finding import RANGES, ContrastSettings, FindingSettings, read_finding
from attnbench.verdict.bounds import PASS
from attnbench.verdict.claims import decide, variant_at

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from small import identity_of

NUM_SEEDS = 10


def findings() -> list[FindingSettings]:
    """Read all yamls of conf/finding."""
    values: dict[str, Any] = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in sorted((CONF / "finding").glob("*.yaml"))
    }
    return [read_finding(name, given) for name, given in values.items()]


def power(finding: FindingSettings, num_draws: int, num_seeds: int = NUM_SEEDS) -> float:
    """Share of draws that PASS, if the scores are as the yaml assumes."""
    assert finding.power is not None
    rng, seeds = np.random.default_rng(0), range(num_seeds)
    passed = 0
    for _ in range(num_draws):
        drawn = {key: rng.normal(mean, spread, num_seeds) for key, (mean, spread) in finding.power.scores.items()}
        # A score that two contrasts are about is one row.
        rows = {
            json.dumps([variant, metric, settings, seed]): _row(variant, metric, settings, seed, float(value))
            for contrast in finding.contrasts
            for variant, metric, settings, values in _scores(finding, contrast, drawn)
            for seed, value in zip(seeds, values, strict=True)
        }
        passed += decide(finding, rows.values(), seeds).verdict == PASS
    return passed / num_draws


Score = tuple[str, str, dict[str, Any], np.ndarray]
"""Variant, metric, settings, and a value a seed."""


def _scores(finding: FindingSettings, contrast: ContrastSettings, drawn: Mapping[str, np.ndarray]) -> Iterator[Score]:
    """Yield the scores that a contrast is about, from what the yaml assumes under the name of the variant, of the
    variant and the metric, of the variant at a rate, or, as pairs that its state holds, of the variant and a width."""
    low, high = RANGES.get(contrast.metric, (-np.inf, np.inf))
    if contrast.evaluation is not None:
        contrast = replace(contrast, settings={**contrast.settings, "of": contrast.evaluation})
    for name in contrast.variants:
        if contrast.kind == "correlation":
            yield from _held(finding, contrast, {key: it for key, it in drawn.items() if key.startswith(f"{name}, ")})
            continue
        rates = finding.variants[name].rates or {"": [0.0]}
        for variant in {variant_at(name, {probe: rate}, finding) for probe, grid in rates.items() for rate in grid}:
            values = drawn.get(f"{variant} {contrast.metric}", drawn.get(variant))
            assert values is not None, variant
            yield variant, contrast.metric, contrast.settings, np.clip(values, low, high)


def _held(finding: FindingSettings, contrast: ContrastSettings, drawn: Mapping[str, np.ndarray]) -> Iterator[Score]:
    """Yield accuracies of models of several widths that recall as many pairs as their state holds, and its size."""
    [cells] = [word.partition("=")[2] for word in finding.overrides if word.startswith("eval.recall.cells=")]
    for key, pairs in drawn.items():
        name, _, width = key.partition(", width ")
        settings = {"width": int(width)}
        yield name, "state_bytes", settings, np.full(len(pairs), int(width) ** 2)
        for _, load in yaml.safe_load(cells):
            values = np.clip(pairs / load, 0, 1)
            yield name, contrast.metric, {**contrast.settings, **settings, "num_pairs": load}, values


def _row(variant: str, metric: str, settings: dict[str, Any], seed: int, value: float) -> ResultRow:
    axes = {name: value for name, value in settings.items() if name != "of"}
    identity = replace(identity_of(), variant=variant, seed=seed)
    if "of" in settings:
        identity = replace(identity, evaluation=settings["of"])
    return ResultRow(identity=identity, measurement=Measurement(metric=metric, value=value, unit="", settings=axes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--draws", type=int, default=1000)
    given = parser.parse_args()
    print("| finding | power with 10 seeds |\n| --- | --: |")
    for finding in findings():
        if finding.power is not None and (not given.names or finding.name in given.names):
            print(f"| {finding.name} | {power(finding, given.draws):.3f} |", flush=True)


if __name__ == "__main__":
    main()
