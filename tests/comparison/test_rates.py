"""How a learning rate is chosen from finished searches."""

from dataclasses import replace
from pathlib import Path

import pytest
from probe_settings import probe_settings
from small import compose_once

from attnbench.comparison.cells import Cell
from attnbench.comparison.search import Choice, Search, search_of_training, searches_of_probe
from attnbench.evals.recall import Recall
from attnbench.results.job import identity
from attnbench.results.rows import Measurement, ResultsWriter
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, RunSettings
from attnbench.training.prepare import Run, prepare

GRID = [3e-3, 1e-2, 3e-2, 1e-1]
STAMP = {"device": "a processor", "commit": None, "dirty": None}


def searched(outputs: Path, **changed) -> RunSettings:
    return probe_settings(outputs, name="recall", **{"recall_learning_rates": GRID, **changed})


def write(cell: Cell, metric: str, value: float | None) -> None:
    """A cell's results, as if it had been run; None for a training that diverged."""
    status, reason = ("ok", "") if value is not None else ("diverged", "not finite")
    own = Measurement(
        metric=metric, value=value, unit="", settings={"split": "validation"}, status=status, reason=reason
    )
    cell.results[0].parents[1].mkdir(parents=True, exist_ok=True)
    with ResultsWriter(cell.results[0], identity(cell.jobs[0], STAMP)) as writer:
        writer.write(Measurement(metric="parameters", value=1000, unit=""))
        writer.write(own)


def searches(settings: RunSettings) -> list[Search]:
    return searches_of_probe(settings, settings.evaluations[0])


def chosen(settings: RunSettings, *scores: float | None) -> Choice:
    """What is chosen when the rates of GRID reached these."""
    [search] = searches(settings)
    assert [cell.rate for cell in search.cells] == GRID
    for cell, score in zip(search.cells, scores, strict=True):
        write(cell, "selection", score)
    return search.choice()


def test_the_best_rate_is_chosen_and_what_each_reached_is_kept(tmp_path):
    settings = searched(tmp_path)
    found = chosen(settings, 0.2, 0.5, 0.9, None)
    assert found.chosen == 3e-2
    assert not found.at_edge
    assert found.taken_from is None
    assert found.grid == GRID
    assert found.scores == {"0.003": 0.2, "0.01": 0.5, "0.03": 0.9, "0.1": None}
    assert (found.variant, found.evaluation) == ("softmax", "recall")
    assert found.settings == {"sequence_length": 16, "width": 16, "num_pairs": 2}


@pytest.mark.parametrize(
    ("scores", "rate", "at_edge"),
    [
        ((0.2, 0.9, 0.9, 0.2), 1e-2, False),
        ((1.0, 1.0, 1.0, 0.1), 1e-2, False),
        ((1.0, 0.5, 1.0, 1.0), 3e-2, False),
        ((1.0, 0.5, 0.1, 0.1), 3e-3, True),
        ((0.1, 0.2, 0.5, 0.9), 1e-1, True),
        ((0.9, 0.1, 0.1, 0.9), 3e-3, True),
        ((None, None, 0.1, None), 3e-2, False),
    ],
)
def test_ties_go_to_the_smaller_inside_the_grid_and_an_edge_is_flagged(scores, rate, at_edge, tmp_path):
    found = chosen(searched(tmp_path), *scores)
    assert (found.chosen, found.at_edge) == (rate, at_edge)


def test_where_all_failed_it_is_the_smallest_and_no_edge_is_best(tmp_path):
    found = chosen(searched(tmp_path), None, None, None, None)
    assert (found.chosen, found.at_edge) == (3e-3, False)


def test_near_chance_no_rate_is_as_good_as_a_better_one(tmp_path):
    assert chosen(searched(tmp_path), 0.0003, 0.0004, 0.0100, 0.0003).chosen == 3e-2


def test_rates_nearer_than_what_matters_between_variants_are_ties(tmp_path):
    assert chosen(searched(tmp_path / "near"), 0.3, 0.893, 0.9, 0.3).chosen == 1e-2
    assert chosen(searched(tmp_path / "far"), 0.3, 0.88, 0.9, 0.3).chosen == 3e-2


def test_a_single_rate_is_not_searched(tmp_path):
    [search] = searches(searched(tmp_path, recall_learning_rates=[1e-2]))
    assert search.cells == []
    found = search.choice()
    assert (found.chosen, found.scores, found.at_edge) == (1e-2, {}, False)


def test_a_neighbour_s_rate_is_taken_over_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.evals.recall.RATE_FROM", {(16, 2): (8, 2)})
    settings = searched(tmp_path, recall_cells=[[16, 2], [8, 2]], recall_reuse_rate=True)
    first, second = searches(settings)
    assert first.cells == []
    assert [cell.rate for cell in second.cells] == GRID
    for cell, score in zip(second.cells, (0.1, 0.9, 0.5, 0.1), strict=True):
        write(cell, "selection", score)
    of_neighbour, own = second.choice(), first.choice()
    assert own.chosen == of_neighbour.chosen == 1e-2
    assert own.settings["sequence_length"] == 16
    assert own.taken_from == of_neighbour.settings == {"sequence_length": 8, "width": 16, "num_pairs": 2}
    assert of_neighbour.taken_from is None
    assert own.scores == of_neighbour.scores


def test_a_search_without_results_is_an_error_that_names_it(tmp_path):
    settings = searched(tmp_path)
    [search] = searches(settings)
    for cell in search.cells[:-1]:
        write(cell, "selection", 0.5)
    with pytest.raises(UserError, match=r"^recall softmax, lr 0\.1, search: has no results"):
        search.choice()


def test_searches_have_a_seed_of_their_own_and_scored_cells_the_plan_s(tmp_path):
    [search] = searches(searched(tmp_path))
    assert {cell.jobs[0].settings.seed for cell in search.cells} == {SELECTION_SEED}
    scored = search.scored(1e-2, [0, 1])
    assert [(cell.jobs[0].settings.seed, cell.rate) for cell in scored] == [(0, 1e-2), (1, 1e-2)]
    assert len({cell.results for cell in scored}) == 2


def test_every_task_has_a_label_of_its_own(tmp_path):
    settings = searched(tmp_path, recall_cells=[[16, 2], [16, 3]], recall_widths=[16, 32])
    cells = [cell for search in searches(settings) for cell in search.cells]
    assert len({cell.label for cell in cells}) == len(cells) == 16
    assert cells[0].label == "recall softmax, width 16, num_pairs 2, lr 0.003, search"


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Run:
    words = ["experiment=demo", "device=cpu", "logger=none", "eval=[perplexity]", "seq_len=32"]
    return prepare(compose_once([*words, f"outputs_dir={tmp_path_factory.mktemp('outputs')}"]))


def test_language_models_take_the_rate_of_the_lowest_validation_loss(language_model, tmp_path):
    own = replace(language_model, settings=replace(language_model.settings, outputs_dir=str(tmp_path)))
    search = search_of_training(own, language_model.settings.evaluations, GRID)
    assert {cell.jobs[0].run.seed for cell in search.cells} == {SELECTION_SEED}
    assert all(len(cell.jobs) == 1 for cell in search.cells)
    for cell, nats in zip(search.cells, (2.0, 1.5, 1.6, None), strict=True):
        write(cell, "nats_per_character", nats)
    found = search.choice()
    assert (found.chosen, found.at_edge, found.evaluation) == (1e-2, False, "training")
    scored = search.scored(found.chosen, [0, 1, 2])
    assert [cell.jobs[0].run.train.learning_rate for cell in scored] == [1e-2] * 3
    assert [len(cell.results) for cell in scored] == [2, 2, 2]


def test_the_probe_at_published_sizes_reuses_one_rate_if_told(tmp_path):
    assert Recall.smoke["learning_rates"] == [1e-2]
    settings = probe_settings(
        tmp_path, name="recall", recall_preset="zoology", recall_cells=[[256, 16], [512, 64]], recall_reuse_rate=True,
        recall_learning_rates=[3e-3, 1e-2],
    )  # fmt: skip
    first, second = searches(settings)
    assert [cell.rate for cell in first.cells] == [3e-3, 1e-2]
    assert second.source is first
