"""The ladder's probes: strings written by hand, labels, chance, and the scores of models made up for them."""

from typing import Any

import pytest
import torch
from probe_models import Answering
from probe_settings import evaluation_class
from small import compose_once

from attnbench.evals.ladder_copy import LadderCopy
from attnbench.evals.ladder_range import LadderRange
from attnbench.evals.ladder_recall import LadderRecall
from attnbench.evals.ladder_state import LadderState
from attnbench.evals.lib.task_data import SPLITS
from attnbench.training.step import Batch

CPU = torch.device("cpu")
PROBES = (LadderCopy, LadderRange, LadderRecall, LadderState)


def task(cls: type, **options: Any) -> Any:
    return cls(**{**cls.smoke, **options}).tasks()[0]


def labels(batch: Batch) -> list[dict[int, int]]:
    """Targets of each sequence by position."""
    columns = (part.tolist() for part in (batch.positions_BL, batch.targets_BT, batch.weight_BT))
    return [
        {place: target for place, target, weight in zip(*row, strict=True) if weight}
        for row in zip(*columns, strict=True)
    ]


def copied(tokens: list[int], separator: int) -> dict[int, int]:
    end = tokens.index(separator)
    return {end + n: tokens[n] for n in range(end)}


def recalled(tokens: list[int], pairs: int) -> dict[int, int]:
    known, asked = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True)), tokens[2 * pairs :: 2]
    return {2 * (pairs + n): known[key] for n, key in enumerate(asked) if key in known}


def test_strings_written_by_hand():
    """c a d b <sep> c a d asks for c a d b from the separator on; k3 v3 k1 v1 . . k1 v7 k3 v2 for v1 and v3."""
    assert copied([2, 0, 3, 1, 9, 2, 0, 3], separator=9) == {4: 2, 5: 0, 6: 3, 7: 1}
    assert recalled([3, 13, 1, 11, 0, 0, 1, 17, 3, 12], pairs=2) == {6: 11, 8: 13}


@pytest.mark.parametrize("split", SPLITS)
def test_copies_are_of_different_symbols_and_labelled_behind_the_separator(split):
    own = task(LadderCopy, lengths=[2, 4, 8], num_symbols=16)
    batch = own.sequences(split, 1, 0, 600, CPU)
    assert batch.tokens_BT.shape == (600, 16)
    lengths = []
    for tokens, told in zip(batch.tokens_BT.tolist(), labels(batch), strict=True):
        assert told == copied(tokens, separator=16)
        symbols = list(told.values())
        assert len(set(symbols)) == len(symbols)
        assert tokens[len(symbols) + 1 : 2 * len(symbols)] == symbols[:-1]
        assert set(tokens[2 * len(symbols) :]) <= {17}
        lengths.append(len(symbols))
    assert lengths == [2, 4, 8] * 200


def test_the_longest_copy_may_have_every_symbol():
    batch = task(LadderCopy, lengths=[8, 16], num_symbols=16).test_sequences(0, 16, CPU)
    assert batch.targets_BT.sort(dim=1).values.eq(torch.arange(16)).all()


@pytest.mark.parametrize("split", SPLITS)
def test_pairs_are_looked_up(split):
    own = task(LadderRecall, pairs=[2, 4], length=20)
    for number, (tokens, told) in enumerate(
        zip(*((b := own.sequences(split, 1, 0, 400, CPU)).tokens_BT.tolist(), labels(b)), strict=True)
    ):
        assert told == recalled(tokens, pairs=(2, 4)[number % 2])
    long = task(LadderRange, num_pairs=2, lengths=[8, 16, 32])
    for batch, length in ((long.sequences(split, 1, 0, 200, CPU), 8), (long.test_sequences(1, 32, CPU), 32)):
        assert batch.tokens_BT.shape[1] == length
        assert all(
            len(told) == 2 and told == {place: recalled(tokens, 2)[place] for place in told}
            for tokens, told in zip(batch.tokens_BT.tolist(), labels(batch), strict=True)
        )


def test_queries_of_the_range_are_as_far_as_the_text_is_long():
    own = task(LadderRange, num_pairs=2, lengths=[16, 32, 64], num_test=4000)
    places = own.test_sequences(0, 64, CPU).positions_BL.flatten().double()
    # Uniform over 4, 6, ... 62.
    assert float(places.mean()) == pytest.approx(33, abs=1)


def scores(own: Any, answer: Any, state: int = 0) -> dict[str, Any]:
    rows = list(own.score(Answering(own.vocabulary_size, answer, state), 0, CPU))
    assert [(row.metric, row.settings) for row in rows] == own.axes()
    over_all = {row.metric: row.value for row in rows if row.metric != "accuracy"}
    return {**over_all, "accuracy": [row.value for row in rows if row.metric == "accuracy"]}


@pytest.mark.parametrize("cls", PROBES)
def test_a_constant_answer_scores_chance(cls):
    own = task(cls, num_test=3000)
    constant = own.test_sequences(0, own.levels[0], CPU).targets_BT[0, 0].item()
    found = scores(own, lambda tokens: constant)
    error = (own.chance / (3000 * len(own.levels))) ** 0.5
    assert found["accuracy"] == pytest.approx([own.chance] * 2, abs=5 * error)
    assert found["doublings"] == pytest.approx(0, abs=10 * error / (1 - own.chance))
    assert found["largest_held"] is None


@pytest.mark.parametrize("rule", ["parity", "s3", "a5"])
def test_states_are_equally_likely(rule):
    own = task(LadderState, rules=[rule], num_test=4000)
    counts = own.test_sequences(0, 2, CPU).targets_BT[:, 12:].flatten().bincount(minlength=own.vocabulary_size)
    share = 1 / own.vocabulary_size
    assert own.chance == share
    assert (counts / 16_000 - share).abs().max() < 5 * (share / 16_000) ** 0.5


def test_a_model_that_holds_some_levels_has_their_score():
    def few(tokens: list[int]) -> int:
        """Recall from the first two pairs alone."""
        known = dict(zip(tokens[:4:2], tokens[1:4:2], strict=False))
        return known.get(tokens[-1], 0)

    found = scores(task(LadderRecall, pairs=[1, 2, 4], length=16, num_test=2000), few, state=2048)
    # Of four pairs it knows two.
    assert found["accuracy"][:2] == [1, 1]
    assert found["doublings"] == pytest.approx(2 + (0.5 - 1 / 16) / (15 / 16), abs=0.02)
    assert found["largest_held"] == 2
    assert found["pairs_recalled"] == pytest.approx(2)
    assert found["pairs_per_kib"] == pytest.approx(1)


def test_copying_and_states_are_scored_beyond_what_is_held():
    def short(tokens: list[int]) -> int:
        """Copy strings of up to four symbols."""
        end = tokens.index(32)
        return tokens[len(tokens) - 1 - end] if end <= 4 else 0

    found = scores(task(LadderCopy, lengths=[2, 4, 8, 16], num_test=500), short)
    assert (found["largest_held"], round(found["doublings"], 1)) == (4, 2.0)

    def eight(tokens: list[int]) -> int:
        """Parity of the first eight bits."""
        return sum(tokens[:8]) % 2

    found = scores(task(LadderState, multiples=[1, 4], num_test=4000), eight)
    assert found["accuracy"][0] == 1
    assert found["largest_held"] == 1
    assert found["doublings"] == pytest.approx(1, abs=0.05)


def test_a_model_without_a_state_has_no_pairs_per_kib(monkeypatch):
    own = task(LadderRecall)
    for backend, reason in ((None, "it keeps no state"), ("fla", "backend fla only trains: it takes no state")):
        monkeypatch.setattr(Answering, "backend_without_state", backend)
        *_, row = own.score(Answering(own.vocabulary_size, lambda _: 0), 0, CPU)
        assert (row.metric, row.status, row.reason) == ("pairs_per_kib", "unsupported", reason)


def test_the_ladder_is_its_four_probes(text, tmp_path):
    own = compose_once(["experiment=demo", "device=cpu", "logger=none", "eval=ladder", f"outputs_dir={tmp_path}"])
    names = [evaluation.name for evaluation in own.evaluations]
    assert names == ["ladder_recall", "ladder_copy", "ladder_state", "ladder_range"]
    for name in names:
        cls = evaluation_class(name)
        assert cls.primary is not None
        assert (cls.primary.metric, cls.primary.kind, cls.primary.margin) == ("doublings", "level", 0.5)
        assert cls.primary.margin_text == "0.5 doublings"
