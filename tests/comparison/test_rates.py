"""How a learning rate is chosen from finished searches."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from probe_settings import probe_settings
from small import compose_once

from attnbench.comparison import search as searching
from attnbench.comparison.program import Answer, Driver, Failure, Undecided, read_or_failure
from attnbench.comparison.search import (
    Found,
    Score,
    Trial,
    best_of_probe,
    next_rate,
    rate_and_scores,
    score_of_training,
    scores_of_probe,
)
from attnbench.results.job import Job, identity
from attnbench.results.row_files import ResultsWriter
from attnbench.results.rows import Measurement
from attnbench.settings.schema import SELECTION_SEED, RunSettings
from attnbench.training.job import Run
from attnbench.training.prepare import prepare
from attnbench.verdict.rates import Choice

GRID = [3e-3, 1e-2, 3e-2, 1e-1]
STAMP = {"device": "a processor", "commit": None, "dirty": None}


def searched(outputs: Path, **changed) -> RunSettings:
    return probe_settings(outputs, name="recall", **{"recall_learning_rates": GRID, **changed})


def write(cell: Job, metric: str, value: float | None, steps: int | None = None) -> None:
    """A cell's results, as if it had been run; None for a training that diverged, or that never reached 0.95."""
    measured = {"parameters": 1000, metric: value, **({"steps_to_95": steps} if metric == "selection" else {})}
    cell.results.parents[1].mkdir(parents=True, exist_ok=True)
    with ResultsWriter(cell.results, identity(cell, STAMP)) as writer:
        for name, number in measured.items():
            status, reason = ("ok", "") if number is not None else ("diverged", "not finite")
            writer.write(
                Measurement(
                    metric=name, value=number, unit="", settings={"split": "validation"}, status=status, reason=reason
                )
            )


def searches(settings: RunSettings, num_seeds: int = 1) -> list[Score]:
    return scores_of_probe(settings, settings.evaluations[0], num_seeds)


def answered(cell: Job) -> Answer:
    return read_or_failure(cell.all_results) if cell.is_done() else Failure("it left nothing")


def rounds(score: Score) -> Iterator[list[Job]]:
    """Yield the trainings that a search asks for, call by call; what was written meanwhile answers it."""
    program, asked = searching.search(score), set()
    try:
        call = next(program)
        while True:
            if new := [cell for cell in call if cell.folder not in asked]:
                yield new
            asked |= {cell.folder for cell in new}
            call = program.send([answered(cell) for cell in call])
    except (StopIteration, Undecided):
        return


def recorded(score: Score, seeds: tuple[int, ...] = ()) -> tuple[Found, list[Job]]:
    """Return the outcome of the existing results, and the trainings that were asked for."""
    found, driver = Found(), Driver()
    driver.run([rate_and_scores(score, seeds, found)])
    return found, [*driver.asked.values()]


def choice_of(score: Score) -> Choice:
    return recorded(score)[0].choices[score.name]


def scored(score: Score, *seeds: int) -> list[Job]:
    return recorded(score, seeds=seeds)[0].scored[score.name]


def chosen(settings: RunSettings, *scores: float | None) -> Choice:
    """What is chosen when the rates of GRID, and those that widen it, reached these."""
    [search] = searches(settings)
    reached = dict(zip([*GRID, 3e-1, 1.0], scores, strict=False))
    for cells in rounds(search):
        for cell in cells:
            write(cell, "selection", reached.get(cell.train.learning_rate, 0.0))
    return choice_of(search)


def test_the_best_rate_is_chosen_and_what_each_reached_is_kept(tmp_path):
    settings = searched(tmp_path)
    found = chosen(settings, 0.2, 0.5, 0.9, None)
    assert found.chosen == 3e-2
    assert not found.at_edge
    assert found.grid == GRID
    assert found.scores == {"0.003": 0.2, "0.01": 0.5, "0.03": 0.9, "0.1": None}
    assert (found.variant, found.evaluation) == ("softmax", "recall")
    assert found.settings == {"sequence_length": 16, "width": 16, "num_pairs": 2}


SOLVED_SOON, SOLVED_LATE, UNSOLVED, FELL_BACK, FAILED = (1.0, 200), (0.97, 900), (0.94, None), (0.4, 100), (None, None)


@pytest.mark.parametrize(
    ("smaller", "larger", "best"),
    [
        # Most seeds solved, however near the others came and however soon one of them did.
        ([SOLVED_LATE] * 3, [SOLVED_SOON, SOLVED_SOON, UNSOLVED], 1e-2),
        # Then the fewest steps.
        ([SOLVED_LATE] * 3, [SOLVED_SOON] * 3, 3e-2),
        ([SOLVED_LATE, UNSOLVED, UNSOLVED], [SOLVED_SOON, UNSOLVED, FAILED], 3e-2),
        # Then the highest mean, a failed seed at 0.
        ([UNSOLVED] * 3, [(0.941, None)] * 3, 3e-2),
        ([(0.5, None)] * 3, [UNSOLVED, UNSOLVED, FAILED], 3e-2),
        # One that passed 0.95 and did not stay there is not solved.
        ([UNSOLVED, SOLVED_LATE, SOLVED_LATE], [FELL_BACK] * 3, 1e-2),
        # And the smaller of equals, rounding apart.
        ([(0.3, None)] * 3, [(0.1 + 0.2, None)] * 3, 1e-2),
        ([SOLVED_SOON] * 3, [SOLVED_SOON] * 3, 1e-2),
        ([FAILED] * 3, [FAILED] * 3, 1e-2),
    ],
)
def test_the_best_rate_of_a_probe_solves_most_seeds_then_soonest_then_highest(smaller, larger, best):
    trials = {
        rate: [Trial(score=score, steps=steps) for score, steps in group]
        for rate, group in ((3e-2, larger), (1e-2, smaller))
    }
    assert best_of_probe(trials, budget=1000)[0] == best


@pytest.mark.parametrize(("kind", "best"), [("accuracy", 3e-2), ("level", 1e-2)])
def test_the_best_rate_of_a_ladder_ends_highest(kind, best):
    job = SimpleNamespace(primary=SimpleNamespace(kind=kind), task=SimpleNamespace(num_steps=1000))
    trials = {3e-2: [Trial(score=0.96, steps=100)], 1e-2: [Trial(score=0.99, steps=900)]}
    assert Score.order(SimpleNamespace(probe=job), trials)[0] == best  # pyright: ignore[reportArgumentType]


def test_a_probe_is_searched_with_seeds_that_are_never_scored_and_each_is_kept(tmp_path):
    [search] = searches(searched(tmp_path), num_seeds=3)
    assert {cell.settings.seed for cell in recorded(search)[1]} == {SELECTION_SEED + index for index in range(3)}
    for cells in rounds(search):
        for cell in cells:
            seed = cell.settings.seed - SELECTION_SEED
            is_good = cell.train.learning_rate == 1e-2
            write(cell, "selection", 0.96 if is_good else 0.1 * seed, steps=300 if is_good else None)
    assert len(recorded(search)[1]) == 3 * len(GRID)
    found = choice_of(search)
    assert (found.chosen, found.at_edge) == (1e-2, False)
    assert found.seeds["0.03"] == pytest.approx([0.0, 0.1, 0.2])
    assert found.scores["0.03"] == pytest.approx(0.1)
    assert found.solved == {"0.003": 0, "0.01": 3, "0.03": 0, "0.1": 0}
    assert found.steps["0.01"] == 300
    assert found.steps["0.03"] == search.prepared.task.num_steps
    # A line over the logarithm of the rate, from 0.1 up to 0.96 and down again, is above 90 % of 0.96 so long.
    assert found.rate_window == pytest.approx(0.1 / 0.86 * 0.96 * (math.log10(10 / 3) + math.log10(3)) * 1.0, rel=1e-2)
    assert found.rate_sensitivity == pytest.approx(3 * 0.86 / 4)


def test_rates_leave_the_search_after_twice_the_steps_of_one_that_has_solved_all_its_seeds(tmp_path):
    [search] = searches(searched(tmp_path), num_seeds=3)
    tried = {}
    for cells in rounds(search):
        for cell in cells:
            tried.setdefault(cell.train.learning_rate, set()).add(cell.limit)
            steps = {1e-2: 300, 3e-2: 100}.get(cell.train.learning_rate)
            # 3e-3 solves two of its seeds, and soon.
            steps = 40 if cell.train.learning_rate == 3e-3 and cell.settings.seed > SELECTION_SEED else steps
            slower = 20 * (cell.settings.seed - SELECTION_SEED)
            write(cell, "selection", 0.96 if steps else 0.3, steps=steps + slower if steps else None)
    # The middle of the grid first, then the next on each side; the slowest of three seeds took 340 steps, then 140.
    assert list(tried.items()) == [(1e-2, {None}), (3e-3, {680}), (3e-2, {680}), (1e-1, {280})]
    assert choice_of(search).chosen == 3e-2
    assert all(cell.limit is None for cell in scored(search, 0))
    # With fixed steps, as in published tables, none leaves.
    [fixed] = searches(searched(tmp_path / "fixed", recall_fixed_steps=True), num_seeds=3)
    for cells in rounds(fixed):
        assert {cell.limit for cell in cells} == {None}
        for cell in cells:
            write(cell, "selection", 0.96, steps=300)


@pytest.mark.parametrize(
    ("scores", "grid", "rate", "at_edge"),
    [
        ((0.1, 0.2, 0.5, 0.9), [*GRID, 3e-1], 1e-1, False),
        ((0.1, 0.2, 0.5, 0.8, 0.9), [*GRID, 3e-1, 1.0], 3e-1, False),
        ((0.1, 0.2, 0.5, 0.7, 0.8, 0.9), [*GRID, 3e-1, 1.0], 1.0, True),
        ((0.9, 0.5, 0.1, 0.1), [1e-3, *GRID], 3e-3, False),
    ],
)
def test_a_best_rate_at_the_edge_widens_the_grid_at_most_twice(scores, grid, rate, at_edge, tmp_path):
    found = chosen(searched(tmp_path), *scores)
    assert (found.grid, found.chosen, found.at_edge) == (grid, rate, at_edge)


def test_where_all_failed_smaller_rates_are_tried_and_no_edge_is_best(tmp_path):
    [search] = searches(searched(tmp_path))
    for cells in rounds(search):
        for cell in cells:
            write(cell, "selection", None)
    found = choice_of(search)
    assert found.grid == [3e-4, 1e-3, *GRID]
    assert (found.chosen, found.at_edge) == (3e-4, False)


def test_a_grid_goes_on_in_its_own_steps():
    assert next_rate([1e-3, 3e-3, 1e-2], above=True) == 3e-2
    assert next_rate([3e-3, 1e-2, 3e-2], above=True) == 1e-1
    assert next_rate([3e-3, 1e-2, 3e-2], above=False) == 1e-3
    assert next_rate([1e-3, 2e-3, 4e-3, 8e-3], above=True) == 1.6e-2
    assert next_rate([1e-3, 2e-3, 4e-3, 8e-3], above=False) == 5e-4


def test_a_single_rate_is_not_searched(tmp_path):
    [search] = searches(searched(tmp_path, recall_learning_rates=[1e-2]))
    assert recorded(search)[1] == []
    found = choice_of(search)
    assert (found.chosen, found.scores, found.at_edge) == (1e-2, {}, False)


def test_a_search_without_results_is_an_error_that_names_it(tmp_path):
    settings = searched(tmp_path)
    [search] = searches(settings)
    for cells in rounds(search):
        for cell in cells:
            if cell.train.learning_rate < 1e-1:
                write(cell, "selection", 0.5)
    reason = recorded(search)[0].undecided[search.name]
    assert str(reason).startswith("recall softmax, lr 0.1, search: has no results")


def test_every_task_has_a_label_of_its_own(tmp_path):
    settings = searched(tmp_path, recall_cells=[[16, 2], [16, 3]], recall_widths=[16, 32])
    cells = [cell for score in searches(settings) for cell in recorded(score)[1]]
    assert len({cell.label for cell in cells}) == len(cells) == 4
    assert cells[0].label == "recall softmax, width 16, num_pairs 2, lr 0.01, search"


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Run:
    words = ["experiment=demo", "device=cpu", "logger=none", "eval=[perplexity]", "seq_len=32"]
    return prepare(compose_once([*words, f"outputs_dir={tmp_path_factory.mktemp('outputs')}"]))


def test_language_models_take_the_rate_of_the_lowest_validation_loss(language_model, tmp_path):
    own = replace(language_model, settings=replace(language_model.settings, outputs_dir=str(tmp_path)))
    search = score_of_training(own, language_model.settings.evaluations, GRID)
    assert {cell.seed for cell in recorded(search)[1]} == {SELECTION_SEED}
    assert all(len(cell.parts) == 1 for cell in recorded(search)[1])
    for cell, nats in zip(recorded(search)[1], (2.0, 1.5, 1.6, None), strict=True):
        write(cell, "nats_per_character", nats)
    found = choice_of(search)
    assert (found.chosen, found.at_edge, found.evaluation) == (1e-2, False, "training")
    cells = scored(search, 0, 1, 2)
    assert [cell.train.learning_rate for cell in cells] == [1e-2] * 3
    assert [len(cell.all_results) for cell in cells] == [2, 2, 2]


def in_stages(run: Run, outputs: Path) -> Score:
    """A search over two epochs with three search seeds, which tries one of them first."""
    settings = replace(run.settings, outputs_dir=str(outputs))
    longer = replace(run, settings=settings, num_steps=2 * run.steps_per_epoch)
    return score_of_training(longer, settings.evaluations, GRID, num_seeds=3)


def test_of_language_models_the_best_after_an_epoch_and_its_neighbours_are_trained_in_full(language_model, tmp_path):
    search = in_stages(language_model, tmp_path)
    stages = rounds(search)
    first = next(stages)
    assert [cell.num_steps for cell in first] == [language_model.steps_per_epoch] * len(GRID)
    assert first[0].label.endswith("lr 0.003, search, one epoch")
    # The second best is no neighbour of the best.
    for cell, nats in zip(first, (2.0, 1.5, 1.7, 1.6), strict=True):
        write(cell, "nats_per_character", nats)
    second = next(stages)
    assert [cell.train.learning_rate for cell in second] == [3e-3] * 3 + [1e-2] * 3 + [3e-2] * 3
    assert [cell.seed - SELECTION_SEED for cell in second] == [0, 1, 2] * 3
    assert {cell.num_steps for cell in second} == {search.prepared.num_steps}
    for cell, nats in zip(second, (1.8, 1.8, None, 1.2, 1.3, 1.2, 1.3, 1.3, 1.4), strict=True):
        write(cell, "nats_per_character", nats)
    assert next(stages, None) is None
    found = choice_of(search)
    assert (found.chosen, found.at_edge) == (1e-2, False)
    assert found.scores == pytest.approx({"0.003": 1.8, "0.01": 3.7 / 3, "0.03": 4 / 3})
    assert found.after_an_epoch == {"0.003": 2.0, "0.01": 1.5, "0.03": 1.7, "0.1": 1.6}
    assert found.solved == found.steps == {}


@pytest.mark.parametrize(
    ("after_an_epoch", "in_full", "stages", "chosen", "at_edge"),
    [
        # The best in full is the largest of the three: its other neighbour follows, and is worse.
        ((2.0, 1.5, 1.6, 1.9), (1.9, 1.4, 1.3, 1.5), [{3e-3, 1e-2, 3e-2}, {1e-1}], 3e-2, False),
        # Or better, and then the best is at the edge of the grid.
        ((2.0, 1.5, 1.6, 1.9), (1.9, 1.4, 1.3, 1.2), [{3e-3, 1e-2, 3e-2}, {1e-1}], 1e-1, True),
        # Failed seeds ask for smaller rates.
        ((1.9, 1.6, 1.5, 1.6), (1.3, None, None, None), [{1e-2, 3e-2, 1e-1}, {3e-3}], 3e-3, True),
    ],
)
def test_of_language_models_the_best_in_full_has_both_neighbours_in_full(
    after_an_epoch, in_full, stages, chosen, at_edge, language_model, tmp_path
):
    search = in_stages(language_model, tmp_path)
    asked = []
    for cells in rounds(search):
        asked.append({cell.train.learning_rate for cell in cells})
        for cell in cells:
            is_first = cell.num_steps == language_model.steps_per_epoch
            scores = after_an_epoch if is_first else in_full
            write(cell, "nats_per_character", scores[GRID.index(cell.train.learning_rate)])
    assert asked == [{*GRID}, *stages]
    found = choice_of(search)
    assert (found.chosen, found.at_edge) == (chosen, at_edge)
    assert {float(rate) for rate in found.scores} == set().union(*stages)
