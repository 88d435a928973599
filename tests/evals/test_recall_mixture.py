"""Recall of a mixture: one model trained on cells of several lengths, in batches of one cell each."""

from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from probe_settings import probe_settings, probe_task
from recall_state import PUBLISHED

from attnbench.cli.compose import CONF, compose
from attnbench.evals.lib.sequences import training_sequences
from attnbench.evals.recall import published_bytes
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.stack import run_stack
from attnbench.model.building import build_meta
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.results.rows import EVALUATION_OPTIONS
from attnbench.training.log import read_metrics
from attnbench.training.step import Batch, loss_and_gradients
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import headline_columns

CPU = torch.device("cpu")
CELLS = [[8, 1, 20], [16, 2, 10], [16, 3, 8]]


task = partial(probe_task, "recall", mixture=CELLS)


def labelled(batches):
    """The tokens of each row that has labels."""
    return [tuple(row) for batch in batches for row in batch.tokens_BT[batch.weight_BT.bool().any(1)].tolist()]


def test_an_epoch_has_all_sequences_of_a_cell_and_then_those_of_the_next():
    own = task()
    sequences = training_sequences(own, 5, CPU)
    # In batches of 8, 20 sequences are 8, 8 and 4; 10 are 8 and 2.
    assert sequences.batches_per_epoch == 3 + 2 + 1
    epochs: Any = [[sequences.batch(6 * epoch + index) for index in range(6)] for epoch in range(2)]
    for batches in epochs:
        assert [(*batch.tokens_BT.shape, batch.targets_BT.shape[1]) for batch in batches] == [
            *((8, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2), (8, 16, 2), (8, 16, 3)),
        ]
        assert [int(batch.weight_BT.any(1).sum()) for batch in batches] == [8, 8, 4, 8, 2, 8]
    for first, last, part in ((0, 3, 0), (3, 5, 1), (5, 6, 2)):
        number = CELLS[part][2]
        expected = own.parts[part].sequences("train", 5, 0, number, CPU)
        found, later = (labelled(batches[first:last]) for batches in epochs)
        assert sorted(found) == sorted(later) == sorted(map(tuple, expected.tokens_BT.tolist()))
        assert found != later
    assert torch.equal(sequences.batch(4).tokens_BT, epochs[0][4].tokens_BT)
    assert sequences.mean_length == pytest.approx((3 * 8 + 3 * 16) / 6)


def test_the_last_batch_of_a_cell_is_a_step_on_the_sequences_that_are_left(tmp_path):
    job = jobs_in(tmp_path)[0]
    model, batch = job.build(), training_sequences(job.task, 5, CPU).batch(2)
    assert batch.weight_BT is not None
    rest = batch.rows(batch.weight_BT.bool().any(1))
    assert len(rest.tokens_BT) == 4
    both: Any = [loss_and_gradients(model.double(), part, None, "float32") for part in (batch, rest)]
    torch.testing.assert_close(both[0], both[1])


def test_cells_with_equal_pairs_have_other_keys():
    own = task(mixture=[[16, 2, 8], [32, 2, 8]])
    short, long = (part.sequences("train", 5, 0, 8, CPU) for part in own.parts)
    assert (short.tokens_BT[:, :4] != long.tokens_BT[:, :4]).any(1).all()


def test_validation_takes_the_cells_in_turn_and_fills_the_shorter_with_blanks():
    own = task(filler="random")
    batch: Batch = own.sequences("validation", 5, 2, 6, CPU)
    assert batch.tokens_BT.shape == (6, 16)
    assert batch.weight_BT is not None
    assert batch.weight_BT.sum(1).tolist() == [3, 1, 2, 3, 1, 2]
    assert (batch.tokens_BT[[1, 4], 8:] == 0).all()
    alone = own.parts[1].sequences("validation", 5, 4, 1, CPU)
    assert torch.equal(batch.tokens_BT[2], alone.tokens_BT[0])
    assert torch.equal(batch.positions_BL[2, :2], alone.positions_BL[0])  # pyright: ignore[reportOptionalSubscript]


class Answering:
    """Stands in for a model: right at the cells it has learned."""

    def __init__(self, learned):
        self.learned = learned

    def __call__(self, model, batch):
        length, pairs = batch.tokens_BT.shape[1], batch.targets_BT.shape[1]
        return torch.full(batch.targets_BT.shape, [length, pairs] in self.learned)


def test_each_test_cell_has_a_row_and_all_have_a_mean(monkeypatch):
    own = task(test_cells=[[8, 1], [16, 2], [32, 8]])
    monkeypatch.setattr("attnbench.evals.recall.correct_labels", Answering([[8, 1], [16, 2]]))
    monkeypatch.setattr("attnbench.evals.recall.published_bytes", lambda model: 0)
    rows: Any = list(own.score(None, 0, CPU))
    assert [row.value for row in rows] == [1, 1, 0, pytest.approx(2 / 3), None]
    cells = [(row.settings["sequence_length"], row.settings["num_pairs"]) for row in rows[:-2]]
    assert cells == [(8, 1), (16, 2), (32, 8)]
    shared = {"width": 16, "split": "test", "chance": 1 / 32}
    assert (rows[-2].metric, rows[-2].settings) == ("mean_accuracy", shared)
    assert [(row.metric, row.settings) for row in rows] == own.axes()
    trained: Any = list(task().score(None, 0, CPU))
    assert [row.settings["num_pairs"] for row in trained[:-1]] == [1, 2, 3]
    alone: Any = list(task(mixture=None, test_cells=[[16, 2], [32, 2]]).score(None, 0, CPU))
    assert [row.metric for row in alone] == ["accuracy", "accuracy", "mean_accuracy"]
    assert task(mixture=None, test_cells=[[16, 2]]).settings == {"width": 16}


def test_published_bytes_are_those_of_the_published_figure():
    finding = yaml.safe_load((CONF / "finding" / "mqar.yaml").read_text())
    mixers = {
        "deltanet": "DeltaNet",
        "gated_deltanet": "GatedDeltaNet",
        "gla": "GatedLinearAttention",
        "mamba2": "Mamba2",
    }
    expected = {
        f"{name}_{width}": num_bytes
        for name, mixer in mixers.items()
        for width, (num_bytes, _) in zip((64, 128), PUBLISHED[mixer], strict=True)
    } | {"softmax_64": 0}
    for variant, num_bytes in expected.items():
        settings = compose(["eval=[recall]", "device=cpu", *finding["overrides"], *finding["variants"][variant]])
        [job] = prepare_probe(settings, settings.evaluations[0])[1]
        assert job.matched is not None
        model = build_meta(job.mixers, job.matched.model, vocabulary_size=job.task.vocabulary_size)
        assert published_bytes(model) == num_bytes, variant


def jobs_in(folder, **options):
    given = {"mixture": CELLS, "test_cells": [[8, 1], [32, 4]], "num_steps": 9, **options}
    settings = probe_settings(folder, name="recall", **{f"recall_{name}": value for name, value in given.items()})
    [job] = prepare_probe(settings, settings.evaluations[0])[1]
    return [job.at(1e-2, seed) for seed in (0, 1)]


@pytest.mark.parametrize("dropout", [None, 0.1])
def test_a_stack_trains_a_mixture_as_each_alone(dropout, tmp_path):
    stacked, alone = (jobs_in(tmp_path / name, embedding_dropout=dropout) for name in ("stacked", "alone"))
    run_stack(stacked, shares_device=False)
    for job in alone:
        run_jobs([job])
    for ours, theirs in zip(stacked, alone, strict=True):
        logs = [read_metrics(job.folder / "metrics.jsonl") for job in (ours, theirs)]
        losses = [[row["loss"] for row in log if "loss" in row] for log in logs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert ours.folder.name == theirs.folder.name
        rows = [row.measurement for row in read_results(theirs.results)]
        cells = [row for row in rows if row.metric == "accuracy"]
        assert [row.settings["num_pairs"] for row in cells] == [1, 4]
        [mean] = [row.value for row in rows if row.metric == "mean_accuracy"]
        assert mean == pytest.approx(fmean(row.value for row in cells))
    columns = headline_columns(figures([row for job in alone for row in read_results(job.results)]), "recall")
    assert [column.header for column in columns] == ["recall at 8, 1", "recall at 32, 4", "recall, mean of cells"]


def test_the_rows_and_the_hash_of_a_mixture_name_its_cells(tmp_path):
    job = jobs_in(tmp_path)[0]
    options = job.row_settings()[EVALUATION_OPTIONS]
    assert (options["mixture"], options["test_cells"]) == (CELLS, [[8, 1], [32, 4]])
    assert not {"length", "pairs", "num_train", "cells"} & options.keys()
    assert options["num_train_sequences"] == 38
    others = [{"mixture": CELLS[::-1]}, {"mixture": [[8, 1, 21], *CELLS[1:]]}, {"test_cells": None}]
    assert len({job.config_hash, *(jobs_in(tmp_path, **other)[0].config_hash for other in others)}) == 4
    usual = probe_settings(tmp_path, name="recall")
    [plain] = prepare_probe(usual, usual.evaluations[0])[1]
    assert not {"mixture", "test_cells"} & plain.row_settings()[EVALUATION_OPTIONS].keys()
