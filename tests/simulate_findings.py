"""Power of findings by simulation, as a Markdown table: `python tests/simulate_findings.py [name ...]`.

Each variant's scores are drawn about the mean and with the spread that its yaml assumes, normal and cut to 0..1; the
tests are those of attnbench/verdict. Findings whose yaml assumes no scores are left out.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from small import identity_of

from attnbench.cli.compose import CONF
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.finding import FindingSettings, read_finding
from attnbench.verdict.claims import decide
from attnbench.verdict.finding import PASS

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
        rows = [
            _row(name, contrast.metric, contrast.settings, seed, score)
            for name, (mean, spread) in finding.power.scores.items()
            for seed, score in zip(seeds, np.clip(rng.normal(mean, spread, num_seeds), 0, 1), strict=True)
            for contrast in finding.contrasts
            if name in contrast.variants
        ]
        passed += decide(finding, rows, seeds).verdict == PASS
    return passed / num_draws


def _row(variant: str, metric: str, settings: dict, seed: int, score: float) -> ResultRow:
    measurement = Measurement(metric=metric, value=float(score), unit="", settings=dict(settings))
    return ResultRow(identity=replace(identity_of(), variant=variant, seed=seed), measurement=measurement)


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
