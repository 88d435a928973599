"""Needle: its labels held against a search through each sequence."""

from functools import partial

import pytest
import torch
from probe_models import Answering
from probe_settings import probe_task
from small import small_model

from attnbench.cli.compose import CONF
from attnbench.evals.lib import scoring
from attnbench.evals.lib.needle_strings import needle_strings
from attnbench.evals.lib.scoring import correct_labels
from attnbench.evals.lib.task_data import SPLITS
from attnbench.evals.needle import Needle
from attnbench.report.inputs import purpose_of

CPU = torch.device("cpu")


task = partial(probe_task, "needle")


def found(tokens, query):
    """Place of the pair and its value, where `query` is the last position."""
    keys = [place for place, token in enumerate(tokens[: query + 1]) if token < 16]
    values = [place for place, token in enumerate(tokens[: query + 1]) if 16 <= token < 32]
    assert len(keys) == 2
    assert tokens[keys[0]] == tokens[query]
    assert keys[1] == query
    assert values == [keys[0] + 1]
    return keys[0], tokens[values[0]]


@pytest.mark.parametrize("split", SPLITS)
def test_the_value_behind_the_key_is_asked_for_at_the_end(split):
    batch = task().sequences(split, 2, 0, 3000, CPU)
    assert batch.tokens_BT.shape == (3000, 12)
    assert (batch.weight_BT == 1).all()
    places = set()
    for tokens, [target], [query] in zip(
        batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.positions_BL.tolist(), strict=True
    ):
        place, value = found(tokens, query)
        assert target == value
        assert set(tokens[query + 1 :]) <= {0}
        places.add((query + 1, place))
    assert places == {(length, place) for length in range(8, 13) for place in range(length - 2)}


def near(tokens):
    """Find the pair if it stands in the first half."""
    place, value = found(tokens, len(tokens) - 1)
    return value if place < len(tokens) / 2 else 0


def no_key(tokens):
    """Name the one value that was read, and look at no key."""
    return sum(token for token in tokens if 16 <= token < 32) % 64


def test_a_model_that_looks_at_no_key_scores_1_and_the_page_says_so():
    assert {row.value for row in task(depths=[0, 50, 100]).score(Answering(64, no_key), 0, CPU)} == {1.0}
    assert "needs no key" in purpose_of(Needle)
    assert "needs no key" in (CONF / "eval" / "needle.yaml").read_text()


def test_each_depth_and_length_is_scored_apart():
    own = task(depths=[0, 40, 70, 100])
    rows = list(own.score(Answering(64, near), 0, CPU))
    assert [(row.metric, row.settings) for row in rows] == own.axes()
    assert [row.value for row in rows] == [1, 1, 0, 0] * 2
    assert {row.num_samples for row in rows} == {16}
    assert {row.settings["chance"] for row in rows} == {1 / 16}
    taken = [row for row in rows if own.primary.takes(row.metric, row.settings)]
    hardest = max(taken, key=lambda row: own.primary.hardness(row.settings))
    assert (hardest.settings["length"], hardest.settings["depth"]) == (12, 0)


def test_distractors_are_pairs_of_other_keys_at_any_place():
    own = task(num_distractors=2, min_length=11, max_length=12, depths=None, test_lengths=[11], num_test=400)
    batch, places = own.sequences("train", 2, 0, 3000, CPU), set()
    for tokens, [target], [query] in zip(
        batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.positions_BL.tolist(), strict=True
    ):
        text = tokens[:query]
        pairs = {token: text[place + 1] for place, token in enumerate(text) if token < 16}
        assert len(pairs) == 3
        assert all(16 <= value < 32 for value in pairs.values())
        assert sum(16 <= token < 32 for token in text) == 3
        assert pairs[tokens[query]] == target
        places.add((query + 1, text.index(tokens[query])))
    assert places == {(length, place) for length in (11, 12) for place in range(length - 2)}
    [row] = own.score(Answering(64, no_key), 0, CPU)
    assert (row.metric, row.settings) == own.axes()[0]
    assert "depth" not in row.settings


def test_of_induction_the_symbol_behind_the_special_one_is_asked_for():
    own = task(num_keys=1, num_values=15, num_filler=0, min_length=12, max_length=12, depths=None, num_test=3000)
    assert own.vocabulary_size == 16
    batch = own.test_sequences(0, 12, CPU)
    for tokens, [target] in zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), strict=True):
        assert tokens.count(0) == 2
        assert tokens[-1] == 0
        assert tokens[tokens.index(0) + 1] == target
    # A constant answer is right as often as chance says.
    shares = batch.targets_BT.flatten().bincount(minlength=16)[1:] / 3000
    assert float((shares - 1 / 15).abs().max()) < 5 * (1 / 15 * 14 / 15 / 3000) ** 0.5
    assert not {"num_keys", "num_values", "num_filler", "num_distractors"} & task().content().keys()


def test_a_sequence_written_by_hand():
    """Unit 1 of f f f f is the pair of key 3 and value 9; with another pair at unit 0 it stands one further right."""
    given = {"longest": 8, "num_keys": 16, "num_values": 16, "num_filler": 32}
    hash_B, eight_B = torch.tensor([5]), torch.tensor([8])
    alone, value = needle_strings(hash_B, eight_B, torch.tensor([1]), num_distractors=0, **given)
    assert [token // 16 for token in alone[0].tolist()] == [alone[0, 0] // 16, 0, 1, *(alone[0, 3:7] // 16).tolist(), 0]
    assert (alone[0, 1], alone[0, 2]) == (alone[0, 7], value)
    beside, value = needle_strings(hash_B, eight_B, torch.tensor([1]), num_distractors=1, **given)
    place = beside[0].tolist().index(int(beside[0, 7]))
    assert place in (1, 2)
    assert beside[0, place + 1] == value


@pytest.mark.parametrize("attn", ["softmax", "gated_deltanet", "lstm"])
def test_long_sequences_are_read_in_pieces_with_one_state(attn, monkeypatch):
    own = task(num_keys=3, num_values=3, num_filler=0, test_lengths=[40], depths=[30], num_test=12)
    model = small_model(attn)
    batch = own.test_sequences(0, 40, CPU, depth=30)
    logits_BLC, _ = model(batch.tokens_BT, positions_BL=batch.positions_BL)
    whole = logits_BLC.argmax(-1) == batch.targets_BT
    monkeypatch.setattr(scoring, "WHOLE", 16)
    assert torch.equal(correct_labels(model, batch), whole)
    # The last piece alone would give other logits.
    last_BLC, _ = model(batch.tokens_BT[:, 32:], positions_BL=batch.positions_BL - 32)
    assert not torch.allclose(last_BLC, logits_BLC)
