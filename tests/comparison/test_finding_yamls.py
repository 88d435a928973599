"""The yamls of conf/finding: what they say fits together, their power is what the simulation gives."""

from dataclasses import replace
from typing import Any

import find_rates
import pytest
import simulate_findings
from small import MIXERS

from attnbench.cli.compose import CONF, compose
from attnbench.comparison.findings import plan_of
from attnbench.comparison.plan import Comparison
from attnbench.settings.finding import FindingsSettings
from attnbench.settings.schema import SELECTION_SEED
from attnbench.verdict.rates import Choice

FINDINGS = {finding.name: finding for finding in simulate_findings.findings()}
CORE = {
    *("parity", "mod_arithmetic", "conv_recall", "rate_window", "recall_state", "nope_copy", "selective_copy"),
    *("induction", "gate_kda"),
}
ON_A_CPU = {"parity", "conv_recall", "nope_copy", "induction", "selective_copy", "gate_kda"}


def test_the_core_and_what_a_cpu_decides_are_those_that_are_published():
    assert {name for name, finding in FINDINGS.items() if finding.core} == CORE
    assert {name for name, finding in FINDINGS.items() if "cpu" in finding.minutes} == ON_A_CPU


@pytest.mark.parametrize("name", FINDINGS)
def test_a_yaml_names_mixers_that_there_are_and_their_claim_in_sentences(name):
    finding = FINDINGS[name]
    words = [word for variant in finding.variants.values() for word in variant.words if word.startswith("attn=")]
    assert {word.removeprefix("attn=") for word in words} <= {*MIXERS, "hybrid"}
    for text in (finding.statement, finding.otherwise):
        assert text[0].isupper()
        assert not text.endswith(".")
    tested = {name for contrast in finding.contrasts for name in contrast.variants}
    assert tested == {*finding.variants}
    assert (CONF / "finding" / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("name", FINDINGS)
def test_the_cells_of_every_finding_can_be_built_at_some_rate(name, tmp_path):
    finding = FINDINGS[name]
    rates = {name: [1e-2] for name in finding.evaluations if name != "perplexity"} | {"training": [2e-3]}
    variants = {it: replace(given, rates=given.rates or rates) for it, given in finding.variants.items()}
    settings = FindingsSettings(
        names=None, full=True, freeze=False, seeds=[0], device="cpu", outputs_dir=str(tmp_path), report=False,
        rerun=False, command="",
    )  # fmt: skip
    # The corpus need not be there.
    overrides = ["data=embedded" if word == "data=wikitext2" else word for word in finding.overrides]
    comparison = Comparison(plan_of(settings, replace(finding, variants=variants, overrides=overrides)), compose)
    assert not comparison.failures
    assert all(score.prepared.matched is not None for score in comparison.scores)


def test_a_search_of_rates_has_a_grid_in_the_place_of_the_yamls_rate_and_scores_no_seed(tmp_path):
    finding = FINDINGS["nope_copy"]
    settings = FindingsSettings(
        names=None, full=False, freeze=False, seeds=[], device="cpu", outputs_dir=str(tmp_path), report=False,
        rerun=False, command="", num_workers=2, devices="all", stack=None,
    )  # fmt: skip
    plan = find_rates.searching(finding, settings, {"copy": [1e-3, 1e-2], "recall": [1e-4]}, num_seeds=2)
    assert (plan.plan.num_workers, plan.plan.devices, plan.plan.stack) == (2, "all", None)
    comparison = Comparison(plan, compose)
    cells: list[Any] = [*comparison.recorded()[1].asked.values()]
    assert [score.grid for score in comparison.scores] == [[1e-3, 1e-2]] * len(finding.variants)
    assert {job.settings.seed for cell in cells for job in cell.parts} == {SELECTION_SEED, SELECTION_SEED + 1}
    assert len(cells) == 2 * 2 * len(finding.variants)
    assert comparison.to_score() == []
    assert not comparison.timed


OF_A_CORRELATION = ("recall_state", "rate_window")
"""Findings whose simulated power takes seconds."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in OF_A_CORRELATION else name
        for name, finding in FINDINGS.items()
        if finding.power is not None
    ],
)
def test_the_power_that_a_yaml_states_is_the_simulated_one(name):
    finding = FINDINGS[name]
    assert finding.power is not None
    assert finding.power.simulated is not None
    # A power near 1 shows in few draws, and a correlation takes a second for two.
    stated = finding.power.simulated
    found = simulate_findings.power(finding, num_draws=10 if stated >= 0.99 else 20 if stated >= 0.95 else 40)
    assert finding.power.simulated == pytest.approx(found, abs=0.1)
    assert finding.power.simulated >= 0.8


def of_one_setting(solved: dict[str, int], steps: dict[str, float], *, chosen: float = 1.0) -> Choice:
    return Choice(
        variant="deltanet",
        evaluation="recall",
        settings={},
        grid=[float(rate) for rate in solved],
        scores={rate: 0.5 for rate in solved},
        solved=solved,
        steps=steps,
        chosen=chosen,
        at_edge=False,
    )


def test_one_rate_for_several_settings_is_the_best_of_all_and_not_of_the_last():
    easy = of_one_setting({"0.01": 3, "0.03": 3, "0.1": 3}, {"0.01": 90, "0.03": 70, "0.1": 50}, chosen=0.1)
    hard = of_one_setting({"0.01": 1, "0.03": 2, "0.1": 0}, {"0.01": 900, "0.03": 800, "0.1": 1000}, chosen=0.03)
    assert find_rates.best_of_all([hard, easy]) == find_rates.best_of_all([easy, hard]) == 0.03
    # As many seeds: then fewest steps.
    same = of_one_setting({"0.01": 2, "0.03": 1, "0.1": 0}, {"0.01": 850, "0.03": 960, "0.1": 1000})
    assert find_rates.best_of_all([easy, same, hard]) == 0.03
    assert find_rates.best_of_all([easy, replace(same, steps={**same.steps, "0.01": 100})]) == 0.01
    # A rate that widened one grid alone was not tried everywhere.
    wider = replace(easy, solved={**easy.solved, "0.3": 9}, steps={**easy.steps, "0.3": 1})
    assert find_rates.best_of_all([wider, hard]) == 0.03
    assert find_rates.best_of_all([replace(wider, chosen=0.3)]) == 0.3
