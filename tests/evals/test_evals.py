"""Every evaluation of conf/eval at its smoke settings, through the runner that every command uses."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from probe_settings import EVALUATIONS, evaluation_class, smoke, smoke_words
from runs import SMALL
from small import compose_once

from attnbench.comparison.search import scores_of_probe
from attnbench.comparison.variants import by_kind
from attnbench.comparison.workers import execute
from attnbench.evals import perplexity
from attnbench.evals.base import Evaluation
from attnbench.evals.runners.checkpoint import language_model_job
from attnbench.evals.runners.system import SystemJob
from attnbench.results.job import Job
from attnbench.results.metrics import Primary
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.schema import RunSettings
from attnbench.training.prepare import prepare
from attnbench.verdict.axes import axes
from attnbench.verdict.seeds import figures

FULL = {"split": "test", "checkpoint": "final", "context": "full", "sequence_length": 32}
"""Settings of the score that slices are parts of."""

COUNTED = ("parameters", "state_bytes", "accuracy", "symbol_accuracy", "string_accuracy", "perplexity")
"""Metrics that are equal in two equal measurements; others are read from a clock or from the system's memory."""


def settings(name: str, text: Path, outputs: Path, *overrides: str, **changed: Any) -> RunSettings:
    own = [f"eval=[{name}]", f"data.path={text}", f"outputs_dir={outputs}", *smoke_words(name, **changed)]
    return compose_once([*SMALL, "data=text", *own, *overrides])


def cells_of(own: RunSettings) -> list[Job]:
    """The evaluation's cells, at one rate and seed."""
    _, probes, system = by_kind(own)
    if probes:
        return [score.at(1e-2, own.seed, None) for score in scores_of_probe(own, probes[0])]
    run = prepare(own)
    return [SystemJob(run, system[0]) if system else language_model_job(run)]


def measured(own: RunSettings) -> list[ResultRow]:
    found = []
    for cell in cells_of(own):
        execute(cell)
        found += [row for path in cell.all_results for row in read_results(path)]
    return [row for row in found if row.identity.evaluation == own.evaluations[0].name]


@pytest.fixture(scope="module")
def at_smoke(text, tmp_path_factory) -> Callable[[str], list[ResultRow]]:
    """Rows of an evaluation at its smoke settings, measured once."""
    return cache(lambda name: measured(settings(name, text, tmp_path_factory.mktemp(name))))


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_has_the_rows_that_it_plots(name, at_smoke):
    found = at_smoke(name)
    assert {row.identity.evaluation for row in found} == {name}
    plots = evaluation_class(name).plots
    assert plots
    # Losses over sizes need sizes that are trained.
    for metric, axis in plots if name != "scaling" else plots[:2]:
        assert any(row.measurement.metric == metric and axis in row.measurement.settings for row in found), metric
    ok = [row for row in found if row.measurement.status == "ok"]
    assert len(ok) >= len(found) / 2
    accuracies = [row.measurement for row in ok if row.measurement.metric.endswith("accuracy")]
    assert all("chance" in own.settings and own.num_samples for own in accuracies)
    # Nothing is measured twice.
    assert len(figures(found)) == len(found)


@pytest.mark.parametrize(
    # It starts processes.
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "memory" else name for name in EVALUATIONS],
)
def test_one_value_more_changes_no_other_row(name, at_smoke, text, tmp_path):
    def numbers(found: list[ResultRow]) -> set[tuple]:
        return {
            (
                own.metric,
                str(sorted(axes(own.settings).items())),
                own.status,
                own.value if own.metric in COUNTED else None,
            )
            for own in (row.measurement for row in found)
            # A slope through all lengths is another one with another length.
            if own.metric != "growth_exponent"
        }

    one_more = evaluation_class(name).one_more
    if not one_more:
        pytest.skip(f"{name} has no axis")
    changed = {f"{name}_{key}": value for key, value in one_more.items()}
    few, more = numbers(at_smoke(name)), numbers(measured(settings(name, text, tmp_path, **changed)))
    assert few <= more
    assert few < more or all(sorted(value) == sorted(smoke(name)[key]) for key, value in one_more.items())


def test_an_evaluation_from_outside_is_judged_at_the_far_end_of_its_plots():
    class Echo(Evaluation):
        plots = (("accuracy", "delay"), ("seconds", "width"))
        primary = Primary(metric="accuracy", kind="accuracy", margin=0.01)

    class Backward(Echo):
        primary = Primary(metric="accuracy", kind="accuracy", margin=0.01, hardest=["-delay"])

    for evaluation, hardest in ((Echo, 16), (Backward, 4)):
        assert evaluation.primary is not None
        assert max([{"delay": 4}, {"delay": 16}], key=evaluation.primary.hardness) == {"delay": hardest}


def test_perplexity_without_a_test_split_is_rows_that_say_so(text, tmp_path):
    found = [row.measurement for row in measured(settings("perplexity", text, tmp_path, "data.test_fraction=0"))]
    of = {split: [own for own in found if own.settings["split"] == split] for split in ("validation", "test")}
    assert {own.status for own in of["validation"]} == {"ok"}
    assert {(own.status, own.reason) for own in of["test"]} == {("unsupported", perplexity.NO_TEST_SPLIT)}
    assert {(own.settings["checkpoint"], own.settings["sequence_length"]) for own in of["test"]} == {
        *(("best", 32), ("final", 32), ("final", 64)),
    }


def test_slices_of_perplexity_are_of_the_final_model_alone_and_change_no_other_row(at_smoke, text, tmp_path):
    found = [row.measurement for row in measured(settings("perplexity", text, tmp_path, perplexity_slice_ngram=3))]
    sliced = [own for own in found if "slice" in own.settings]
    assert {own.settings["checkpoint"] for own in sliced} == {"final"}
    shares = {own.settings["slice"]: own.value for own in sliced if own.metric == "token_share"}
    assert sum(shares.values()) == pytest.approx(1)
    whole = next(own for own in found if own.metric == "nats_per_character" and own.settings | FULL == own.settings)
    parts = {own.settings["slice"]: own.value for own in sliced if own.metric == "nats_per_character"}
    assert sum(shares[name] * value for name, value in parts.items()) == pytest.approx(whole.value, rel=1e-5)

    def others(rows):
        return [(own.metric, own.value, axes(own.settings)) for own in rows if "slice" not in own.settings]

    assert others(found) == others(row.measurement for row in at_smoke("perplexity"))
