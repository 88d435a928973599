"""The synthetic tasks: their random numbers, splits and targets, and how they are scored."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from probe_models import Answering
from probe_settings import probe_task
from torch import nn
from torch.nn.functional import pad

from attnbench.cli.compose import CONF
from attnbench.data.batches import block_order
from attnbench.data.counters import hashed
from attnbench.evals.copy_task import BLANK, PADDING, SEPARATOR, START, Copy
from attnbench.evals.lib import scoring, task_data
from attnbench.evals.lib import sequences as training_data
from attnbench.evals.lib.mad_rules import MAD_RULES
from attnbench.evals.lib.recall_strings import BLANK as NOTHING
from attnbench.evals.lib.scoring import correct_labels, mean_accuracy
from attnbench.evals.lib.sequences import NUM_BUCKETS, TrainingSequences
from attnbench.evals.lib.state_rules import RULES
from attnbench.evals.lib.task_data import ABSENT, SPLITS, choose, choose_by_power, integers_below, split_of
from attnbench.evals.recall import Recall
from attnbench.evals.state_tracking import StateTracking
from attnbench.settings.errors import UserError
from attnbench.training.step import Batch

CPU = torch.device("cpu")
SELECTED = [256, 16], [512, 64]


def evaluation(cls, **options) -> Any:
    name = "recall" if cls is Recall else "copy"
    content = yaml.safe_load((CONF / "eval" / f"{name}.yaml").read_text())
    content |= {"learning_rates": [1e-3, 1e-2], **cls.smoke, **options}
    content.pop("_target_")
    return cls(**content)


def copy_task(cls=Copy, **options) -> Any:
    return evaluation(cls, **{"max_length": 12, "test_lengths": [3, 12, 20], **options}).tasks()[0]


def recall_task(**options) -> Any:
    return evaluation(Recall, **{"cells": [[40, [2, 4, 9]]], "vocabulary_size": 40, **options}).tasks()[0]


def state_task(rule, **options) -> Any:
    return probe_task("state_tracking", rules=[rule], **options)


TASKS = {
    "copy": copy_task,
    "selective copy": lambda: copy_task(selective=True),
    "recall": recall_task,
    "recall in drawn order": lambda: recall_task(preset="zoology_full", filler="blank", cells=[[40, 9]]),
    "recall of blanks": lambda: recall_task(filler="blank", cells=[[40, 9]]),
    "recall among any symbols": lambda: recall_task(filler="vocabulary", cells=[[40, 9]]),
}

ALL = {
    **TASKS,
    "needle": lambda: probe_task("needle"),
    **{rule: partial(probe_task, "mad", cells=[[rule, 60]]) for rule in MAD_RULES},
    # Shorter strings may be in several splits.
    **{rule: partial(state_task, rule, min_length=10, max_length=14) for rule in RULES},
    **{name: partial(probe_task, name) for name in ("ladder_copy", "ladder_range", "ladder_recall")},
    "ladder_state": lambda: probe_task("ladder_state", min_length=20, max_length=24),
}


def chi_square(counts, expected):
    """In standard deviations from its mean: below 5 for numbers that follow the expected distribution."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - len(counts) + 1) / math.sqrt(2 * (len(counts) - 1)))


def uniformity(numbers, bound):
    counts = numbers.flatten().bincount(minlength=bound)
    assert len(counts) == bound
    return chi_square(counts, torch.full((bound,), numbers.numel() / bound))


def test_one_counter_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [number % 2**64 for number in hashed(1234567, torch.arange(4)).tolist()] == published


def test_counters_are_hashed_one_after_another():
    hash_AB = hashed(-5, torch.tensor([[0], [7], [2**40]]), 3, torch.tensor([0, 2**31]))
    assert hash_AB.shape == (3, 2)
    for row, first in enumerate((0, 7, 2**40)):
        for column, last in enumerate((0, 2**31)):
            assert hash_AB[row, column] == hashed(hashed(hashed(-5, first), 3), last)


def test_numbers_are_uniform_over_every_counter_and_flip_half_their_bits():
    n = torch.arange(100_000)
    streams = {
        "index": hashed(0, 3, 0, n, 5),
        "slot": hashed(0, 3, 0, 17, n),
        "seed": hashed(0, n, 0, 17, 5),
        "attempt": hashed(hashed(0, 3), n),
    }
    for name, hash_N in streams.items():
        for bound in (2, 26, 1000):
            assert abs(uniformity(integers_below(hash_N, bound), bound)) < 5, (name, bound)
        pairs = integers_below(hash_N[:-1], 26) * 26 + integers_below(hash_N[1:], 26)
        assert abs(uniformity(pairs, 676)) < 5, name
        flipped = ((hash_N[:-1] ^ hash_N[1:])[:, None] >> torch.arange(64)) & 1
        assert (flipped.double().mean(0) - 0.5).abs().max() < 0.01, name


def test_chosen_integers_are_different_and_every_order_is_equally_likely():
    chosen_BK = choose(hashed(1, torch.arange(60_000)), 5, 3)
    assert all(len(set(row)) == 3 for row in chosen_BK[:500].tolist())
    counts = (chosen_BK @ torch.tensor([25, 5, 1])).bincount(minlength=125)
    assert (counts > 0).sum() == 60
    assert abs(uniformity(torch.repeat_interleave(torch.arange(60), counts[counts > 0]), 60)) < 5
    assert sorted(choose(hashed(1, torch.arange(1)), 7, 7)[0].tolist()) == list(range(7))


def test_slots_are_drawn_one_after_another_by_their_weight():
    num_slots, power = 4, 0.99
    rows = 60_000
    slots_BK = choose_by_power(
        hashed(2, torch.arange(rows)), torch.full((rows,), num_slots), max_slots=6, num_chosen=2, power=power
    )
    weight = [slot**-power for slot in range(1, num_slots + 1)]
    pairs = [(a, b) for a in range(num_slots) for b in range(num_slots) if a != b]
    expected = torch.tensor([weight[a] / sum(weight) * weight[b] / (sum(weight) - weight[a]) for a, b in pairs])
    counts = ((slots_BK - 1) @ torch.tensor([10, 1])).bincount(minlength=100)
    assert sum(counts[10 * a + b] for a, b in pairs) == rows
    assert abs(chi_square(torch.stack([counts[10 * a + b] for a, b in pairs]), expected * rows)) < 5


def test_a_split_is_a_share_of_contents_and_does_not_see_what_is_absent():
    content_BT = integers_below(hashed(3, torch.arange(50_000)[:, None], torch.arange(6)), 26)
    split_B = split_of(content_BT)
    shares = torch.tensor([6, 1, 1]) * 50_000 / 8
    assert abs(chi_square(split_B.bincount(), shares)) < 5
    assert torch.equal(split_of(torch.cat([content_BT, torch.full((50_000, 4), ABSENT)], 1)), split_B)
    assert not torch.equal(split_of(content_BT.flip(1)), split_B)


def contents(name, task, split, seed):
    """Strings of 4 symbols, or whole sequences of recall."""
    batch = task.sequences(split, seed, 0, 4000, CPU)
    if "copy" in name:
        return {
            tuple(row[:4]) for row, w in zip(batch.targets_BT.tolist(), batch.weight_BT, strict=True) if w.sum() == 4
        }
    return set(map(tuple, batch.tokens_BT.tolist()))


@pytest.mark.parametrize("name", ["copy", "selective copy", "recall"])
def test_splits_are_disjoint_by_content_whatever_the_seed(monkeypatch, name):
    # A small alphabet, so that contents meet: 4 symbols to the power of 4, and few keys and values.
    monkeypatch.setattr("attnbench.evals.copy_task.NUM_SYMBOLS", 4)
    small = {"cells": [[6, 1]], "vocabulary_size": 6, "filler": "random"}
    task = recall_task(**small) if name == "recall" else copy_task(max_length=4, selective=name != "copy")
    seen = {(split, seed): contents(name, task, split, seed) for split in SPLITS for seed in (0, 1)}
    for split in SPLITS:
        others = [found for (other, _), found in seen.items() if other != split]
        for seed in (0, 1):
            assert seen[split, seed]
            assert not seen[split, seed].intersection(*[set().union(*others)])
        assert seen[split, 0] & seen[split, 1], "contents of two seeds never meet, so the test says nothing"


def test_a_task_without_a_sequence_for_a_split_says_so():
    # There is one key, which stands at the start and behind its value, and two values: two sequences for three splits.
    task = recall_task(cells=[[4, 1]], vocabulary_size=4, filler="blank")
    found = set()
    for split in SPLITS:
        try:
            found.add(split if task.sequences(split, 0, 0, 1, CPU) else None)
        except UserError as error:
            assert f"{split} data: no sequence of it" in str(error)  # noqa: PT017
    assert len(found) < 3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("split", SPLITS)
def test_a_sequence_depends_on_seed_split_and_index_alone(monkeypatch, name, split):
    task = ALL[name]()
    whole: Any = task.sequences(split, 5, 0, 20, CPU)
    task.sequences("train", 6, 0, 3, CPU)
    parts = [task.sequences(split, 5, start, count, CPU) for start, count in ((0, 1), (1, 12), (13, 7))]
    monkeypatch.setattr(task_data, "ROWS_AT_ONCE", {"cpu": 7})
    in_small_pieces = task.sequences(split, 5, 0, 20, CPU)
    for field, expected in enumerate(whole[:4]):
        assert torch.equal(torch.cat([part[field] for part in parts]), expected)
        assert torch.equal(in_small_pieces[field], expected)
    for other in (task.sequences(split, 6, 0, 20, CPU), task.sequences(split, 5, 20, 20, CPU)):
        assert (other.tokens_BT != whole.tokens_BT).any(1).double().mean() > 0.9


@pytest.mark.parametrize("name", [name for name in ALL if "copy" not in name or "ladder" in name])
def test_no_sequence_is_in_two_splits(name):
    batches = [ALL[name]().sequences(split, 5, 0, 400, CPU) for split in SPLITS]
    rows = [torch.cat([batch.weight_BT.sum(1, keepdim=True), batch.tokens_BT], 1).tolist() for batch in batches]
    seen = [set(map(tuple, of_split)) for of_split in rows]
    assert min(map(len, seen)) > 100
    assert sum(map(len, seen)) == len(set.union(*seen))


def copied(tokens):
    """The string that a sequence of copy asks for, and what it answers, read by eye: with loops."""
    assert tokens[0] == START
    split = tokens.index(SEPARATOR)
    string = [token for token in tokens[1:split] if token != BLANK]
    answer, rest = tokens[split + 1 : split + 1 + len(string)], tokens[split + 1 + len(string) :]
    assert set(string) <= set(range(26))
    assert rest
    assert set(rest) == {PADDING}
    return string, answer, split


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_copy_asks_for_the_string_and_scores_exactly_its_symbols(selective, split):
    task = copy_task(selective=selective)
    batch = task.sequences(split, 0, 0, 120, CPU)
    assert batch.tokens_BT.shape == (120, (3 if selective else 2) * 12 + 3)
    for tokens, targets, weight, positions in zip(*map(torch.Tensor.tolist, batch[:4]), strict=True):
        string, answer, separator = copied(tokens)
        assert answer == string
        assert separator - 1 == (2 if selective else 1) * len(string)
        assert weight == [1.0] * len(string) + [0.0] * (12 - len(string))
        labels = dict(zip(positions[: len(string)], targets, strict=False))
        assert labels == {separator + i: symbol for i, symbol in enumerate(string)}
        assert all(tokens[position + 1] == symbol for position, symbol in labels.items())
    assert int(batch.tokens_BT.max()) < task.vocabulary_size


def test_selective_copy_scatters_symbols_over_all_places_alike():
    batch = copy_task(selective=True, test_lengths=[3], num_test=6000).test_sequences(0, 3, CPU)
    taken_BS = batch.tokens_BT[:, 1:7] != BLANK
    assert (taken_BS.sum(1) == 3).all()
    patterns = (taken_BS.long() @ 2 ** torch.arange(6)).bincount(minlength=64)
    assert (patterns > 0).sum() == 20
    assert abs(chi_square(patterns[patterns > 0], torch.full((20,), 300.0))) < 5


@pytest.mark.parametrize("split", SPLITS)
def test_copy_lengths_are_uniform_in_every_split(split):
    lengths = copy_task(max_length=6).sequences(split, 0, 0, 6000, CPU).weight_BT.sum(1).long() - 1
    assert abs(uniformity(lengths, 6)) < 5


@pytest.mark.parametrize("split", SPLITS)
def test_strings_too_short_to_be_kept_apart_are_in_every_split(split):
    batch = copy_task(max_length=4).sequences(split, 0, 0, 2000, CPU)
    assert set(batch.targets_BT[batch.weight_BT.sum(1) == 1][:, 0].tolist()) == set(range(26))


def looked_up(tokens, num_pairs):
    """Value by key of the pairs at the start, and the key asked for at every later position that asks."""
    keys, values = tokens[: 2 * num_pairs : 2], tokens[1 : 2 * num_pairs : 2]
    asked = {place: token for place, token in enumerate(tokens) if place >= 2 * num_pairs and token in keys}
    return dict(zip(keys, values, strict=True)), asked


@pytest.mark.parametrize("filler", ["blank", "random"])
@pytest.mark.parametrize("vocabulary_size", [40, 41])
def test_recall_asks_for_every_key_once_and_wants_its_value(filler, vocabulary_size):
    task = recall_task(filler=filler, vocabulary_size=vocabulary_size)
    batch = task.sequences("train", 0, 0, 120, CPU)
    assert batch.tokens_BT.shape == (120, 40)
    assert batch.weight_BT.shape == (120, 9)
    counts = []
    for tokens, targets, weight, positions in zip(*map(torch.Tensor.tolist, batch[:4]), strict=True):
        num_pairs = int(sum(weight))
        counts.append(num_pairs)
        assert weight == [1.0] * num_pairs + [0.0] * (9 - num_pairs)
        value_of, asked = looked_up(tokens, num_pairs)
        assert len(value_of) == len(set(value_of.values())) == num_pairs
        assert set(value_of) <= set(range(1, 20))
        assert set(value_of.values()) <= set(range(20, vocabulary_size))
        assert sorted(asked.values()) == sorted(value_of)
        assert all(place % 2 == 0 for place in asked)
        labels = dict(zip(positions[:num_pairs], targets, strict=False))
        assert labels == {place: value_of[key] for place, key in asked.items()}
        rest = {token for place, token in enumerate(tokens) if place >= 2 * num_pairs and place not in asked}
        assert rest <= ({NOTHING} if filler == "blank" else set(range(20, vocabulary_size)))
    assert counts == [2, 4, 9] * 40


def test_between_queries_any_symbol_may_stand():
    batch = recall_task(filler="vocabulary", cells=[[40, 4]]).sequences("train", 0, 0, 4000, CPU)
    is_filler_BT = torch.ones_like(batch.tokens_BT, dtype=torch.bool).scatter(1, batch.positions_BL, False)
    is_filler_BT[:, :8] = False
    assert abs(uniformity(batch.tokens_BT[is_filler_BT], 40)) < 5
    for tokens, targets, positions in zip(*map(torch.Tensor.tolist, (batch[0], batch[1], batch[3])), strict=True):
        value_of = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        assert [value_of[tokens[place]] for place in positions] == targets
        assert sorted(tokens[place] for place in positions) == sorted(value_of)


def test_a_string_of_recall_has_pairs_then_queries_among_the_filler():
    task = recall_task(filler="vocabulary", cells=[[14, 3]], vocabulary_size=20)
    tokens, targets, _, positions = (part[0].tolist() for part in task.sequences("train", 0, 9, 1, CPU)[:4])
    # Pairs 5 16, 7 15 and 9 19; queries 5, 9 and 7, each with a symbol of the filler behind it.
    assert tokens == [5, 16, 7, 15, 9, 19, 5, 13, 19, 2, 9, 9, 7, 3]
    assert dict(zip(positions, targets, strict=True)) == {6: 16, 10: 19, 12: 15}


@pytest.mark.parametrize("filler", ["blank", "random", "vocabulary"])
def test_a_constant_answer_scores_chance_at_recall(filler):
    task = recall_task(filler=filler, cells=[[40, 4]], num_test=3000)
    [row] = task.score(Answering(40, lambda _: 25), 0, CPU)
    # Five standard errors of 12,000 labels.
    assert row.value == pytest.approx(row.settings["chance"], abs=5 * (0.05 * 0.95 / 12_000) ** 0.5)


def test_queries_lie_near_the_pairs_as_often_as_the_power_law_says():
    batch = recall_task(cells=[[22, 1]], num_test=20_000).test_sequences(0, 1, CPU)
    weight = torch.arange(1, 11).double() ** -0.99
    counts = (batch.positions_BL[:, 0] // 2 - 1).bincount(minlength=10)
    assert abs(chi_square(counts, 20_000 * weight / weight.sum())) < 5


def test_no_pair_is_asked_for_before_the_others():
    batch = recall_task(cells=[[14, 3]], num_test=6000).test_sequences(0, 3, CPU)
    key_BP, order_BP = batch.tokens_BT[:, :6:2], batch.positions_BL.argsort(1)
    queries_BP = batch.tokens_BT.gather(1, batch.positions_BL.gather(1, order_BP))
    pair_of_query_BP = (queries_BP[:, :, None] == key_BP[:, None]).long().argmax(-1)
    counts = (pair_of_query_BP @ torch.tensor([9, 3, 1])).bincount(minlength=27)
    assert abs(chi_square(counts[counts > 0], torch.full((6,), 1000.0))) < 5


def test_in_drawn_order_the_first_pair_has_the_slot_that_is_drawn_first():
    task = recall_task(preset="zoology_full", filler="random", cells=[[14, 2]], num_test=6000)
    batch = task.test_sequences(0, 2, CPU)
    assert torch.equal(batch.targets_BT, batch.tokens_BT[:, 1:4:2])
    assert torch.equal(batch.tokens_BT.gather(1, batch.positions_BL), batch.tokens_BT[:, :4:2])
    weight = torch.arange(1, 6).double() ** -0.99
    counts = (batch.positions_BL[:, 0] // 2 - 2).bincount(minlength=5)
    assert abs(chi_square(counts, 6000 * weight / weight.sum())) < 5


GOLDEN = [
    ("copy", "train", 0, "26 21 20 8 17 3 3 19 27 21 20 8 17 3 3 19 28 28 28 28 28"),
    ("copy", "test", 2, "26 7 5 4 16 7 6 27 7 5 4 16 7 6 28 28 28 28 28 28 28 28"),
    ("selective copy", "train", 0, "26 21 20 8 17 29 29 3 29 29 3 29 29 19 29 27 21 20 8 17"),
    ("selective copy", "test", 2, "26 29 29 7 29 5 4 16 29 7 6 29 29 27 7 5 4 16 7 6 28 28"),
    ("recall", "train", 0, "18 25 16 27 6 37 4 28 15 20 17 36 19 32 5 30 13 22 5 28"),
    ("recall", "test", 2, "18 20 8 35 6 27 10 21 13 31 9 24 3 22 17 39 4 30 3 26 8"),
    ("recall of blanks", "train", 0, "12 38 3 39 17 29 14 30 9 26 10 20 1 27 18 31 16 35 16 0"),
    ("recall of blanks", "test", 2, "13 27 8 29 16 24 19 33 10 23 7 34 17 25 18 21 5 22 19 0"),
]
"""Task, split, seed, and how sequence 5 begins."""


@pytest.mark.parametrize(("name", "split", "seed", "beginning"), GOLDEN)
def test_sequences_are_those_they_have_always_been(name, split, seed, beginning):
    found = " ".join(map(str, TASKS[name]().sequences(split, seed, 5, 1, CPU).tokens_BT[0].tolist()))
    assert found.startswith(beginning), "scores no longer compare with earlier ones: say so where they are published"


class Knowing(nn.Module):
    """Answers a batch that it knows, but for the labels it is told to miss; remembers how it was called."""

    def __init__(self, batches, num_symbols, missed=()):
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, 1)
        self.answers = {
            tuple(tokens): targets
            for batch in batches
            for tokens, targets in zip(batch.tokens_BT.tolist(), batch.targets_BT, strict=True)
        }
        self.missed, self.sizes, self.modes = list(missed), [], []

    def forward(self, tokens_BT, state=None, positions_BL=None):
        self.sizes.append(len(tokens_BT))
        assert positions_BL is not None
        self.modes.append((self.training, torch.is_grad_enabled()))
        targets_BL = torch.stack([self.answers[tuple(tokens)] for tokens in tokens_BT.tolist()])
        assert positions_BL.shape == targets_BL.shape
        targets_BL[:, self.missed] = (targets_BL[:, self.missed] + 1) % self.embedding.num_embeddings
        return nn.functional.one_hot(targets_BL, self.embedding.num_embeddings).float(), None


def test_correct_labels_are_found_in_pieces_and_absent_ones_are_not_among_them(monkeypatch):
    task = recall_task()
    batch = task.sequences("test", 0, 0, 30, CPU)
    model: Any = Knowing([batch], task.vocabulary_size, missed=[1]).train()
    expected_BL = batch.weight_BT.bool()
    expected_BL[:, 1] = False
    assert torch.equal(correct_labels(model, batch), expected_BL)
    monkeypatch.setitem(scoring.MAX_ELEMENTS, "cpu", 7 * (9 * task.vocabulary_size + 40**2))
    assert torch.equal(correct_labels(model, batch), expected_BL)
    assert model.sizes == [30, 7, 7, 7, 7, 2]
    assert set(model.modes) == {(False, False)}
    assert model.training
    # Of 2, 4 and 9 labels one is missed.
    assert mean_accuracy(model, batch) == pytest.approx((1 / 2 + 3 / 4 + 8 / 9) / 3)


def test_copy_scores_symbols_and_whole_strings_at_each_length():
    task = copy_task(num_test=40)
    batches = [task.test_sequences(0, length, CPU) for length in task.test_lengths]
    assert [batch.tokens_BT.shape for batch in batches] == [(40, 9), (40, 27), (40, 43)]
    assert all((batch.weight_BT == 1).all() for batch in batches)
    rows = list(task.score(Knowing(batches, task.vocabulary_size, missed=[1]), 0, CPU))
    found = {(row.metric, row.settings["length"]): row for row in rows}
    assert len(found) == len(rows) == 6
    for length in task.test_lengths:
        symbols, strings = found["symbol_accuracy", length], found["string_accuracy", length]
        assert symbols.value == pytest.approx(1 - 1 / length)
        assert (symbols.num_samples, strings.num_samples) == (40 * length, 40)
        assert strings.value == 0
        beyond = length > task.max_length
        assert symbols.settings == {"length": length, "beyond_training": beyond, "split": "test", "chance": 1 / 26}
        assert strings.settings["chance"] == pytest.approx(26.0**-length)
        assert symbols.low is symbols.high is None
    assert [(row.metric, row.settings) for row in rows] == task.axes()
    perfect = list(task.score(Knowing(batches, task.vocabulary_size), 0, CPU))
    assert {row.value for row in perfect} == {1.0}
    validation = task.sequences("validation", 0, 0, 500, CPU)
    model: Any = Knowing([validation], task.vocabulary_size)
    assert mean_accuracy(model, validation) == 1


def test_recall_scores_every_number_of_pairs():
    task = recall_task(num_test=40, widths=[24])
    batches = [task.test_sequences(0, pairs, CPU) for pairs in task.pairs]
    rows = list(task.score(Knowing(batches, task.vocabulary_size, missed=[0]), 0, CPU))
    for row, pairs in zip(rows, (2, 4, 9), strict=True):
        assert row.metric == "accuracy"
        assert row.value == pytest.approx(1 - 1 / pairs)
        assert row.num_samples == 40 * pairs
        place = {"sequence_length": 40, "width": 24, "num_pairs": pairs, "split": "test"}
        assert row.settings == {**place, "chance": 1 / 20, "chance_among_pairs": 1 / pairs}
    validation = task.sequences("validation", 0, 0, 500, CPU)
    model: Any = Knowing([validation], task.vocabulary_size)
    assert mean_accuracy(model, validation) == 1


def test_test_strings_of_two_lengths_do_not_begin_alike():
    task = copy_task(num_test=200)
    short, long = (task.test_sequences(0, length, CPU).targets_BT for length in (12, 20))
    assert (short != long[:, :12]).any(1).all()


def test_a_preset_gives_the_options_that_are_null_and_sizes_by_length():
    def sizes(**options):
        tasks = evaluation(Recall, **{**NULLS, "preset": "zoology", **options}).tasks()
        return [(task.settings["sequence_length"], task.model.dim, task.num_steps, task.batch_size) for task in tasks]

    assert len(sizes()) == 16
    assert (sizes()[2], sizes()[-1]) == ((256, 64, 1000, 256), (512, 512, 5000, 128))
    assert sizes(batch_size=32, num_steps=9, cells=[[512, 64]], widths=[16]) == [(512, 16, 9, 32)]


def test_a_recall_model_has_one_head_and_no_feed_forward_unless_it_is_given_them():
    for task in evaluation(Recall, widths=[16, 24], conv_size=None, output_gate=None).tasks():
        assert task.model.head_width == task.model.dim == task.settings["width"]
        assert task.model.feed_forward_width == 0
        assert task.mixer_options == {}
    [task] = evaluation(Recall, widths=[16], head_width=8, feed_forward_width=24).tasks()
    assert (task.model.head_width, task.model.feed_forward_width) == (8, 24)


NULLS = dict.fromkeys(
    ["cells", "widths", "vocabulary_size", "num_train", "num_test", "num_steps", "batch_size", "filler"]
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_device_has_the_same_sequences(name, split):
    task = TASKS[name]()
    here, there = (task.sequences(split, 3, 10, 2000, device) for device in (CPU, torch.device("cuda")))
    for a, b in zip(here, there, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b.cpu())


class FewStrings(Copy):
    num_train_sequences = 50  # pyright: ignore[reportAssignmentType]


class Bucketed(Copy):
    length_buckets = True


IN_MEMORY = {
    "copy": lambda: copy_task(FewStrings),
    "recall": lambda: recall_task(vocabulary_size=400, num_train=50),
    "parity": lambda: state_task("parity", num_steps=7),
    "arithmetic": lambda: state_task("mod_arithmetic", num_steps=7),
}
"""Tasks with several epochs, one epoch, and labels at every position or at some."""


@pytest.mark.parametrize("name", IN_MEMORY)
def test_few_training_sequences_are_shuffled_as_a_whole_and_stored_small(name):
    task = IN_MEMORY[name]()
    sequences, every = TrainingSequences(task, 5, CPU), task.sequences("train", 5, 0, task.num_train_sequences, CPU)
    for step in (0, 3, 5, 13, 6):
        epoch, index = divmod(step, task.num_train_sequences // 8)
        order = block_order(task.num_train_sequences, 5, epoch)[8 * index : 8 * index + 8]
        expected, stored = every.rows(order), sequences.batch(step)
        found = stored.wide()
        assert stored.tokens_BT.dtype == (torch.int16 if task.vocabulary_size > 128 else torch.int8)
        for part in ("tokens_BT", "targets_BT", "weight_BT"):
            assert torch.equal(getattr(found, part), getattr(expected, part))
            assert getattr(found, part).dtype == getattr(expected, part).dtype
        column_BL = torch.arange(expected.targets_BT.shape[1]).expand_as(expected.targets_BT)
        at_every = expected.positions_BL.where(expected.weight_BT > 0, column_BL).eq(column_BL).all()
        assert (found.positions_BL is None) == (name == "parity") == bool(at_every)
        assert found.positions_BL is None or torch.equal(found.positions_BL, expected.positions_BL)


@pytest.fixture
def streamed(monkeypatch):
    """Tasks of 100 sequences and more are streamed, 64 at a time."""
    monkeypatch.setattr(training_data, "STREAMED_FROM", 100)
    monkeypatch.setattr(training_data, "CHUNK", 64)


@pytest.mark.parametrize("buckets", [False, True])
def test_a_streamed_batch_depends_on_seed_and_step_alone_and_every_string_comes_once(streamed, buckets, monkeypatch):
    task, asked = state_task("parity", num_steps=27, length_buckets=buckets), []
    generate = StateTracking.sequences

    def counted(self, split, seed, start, count, device):
        asked.append(count)
        return generate(self, split, seed, start, count, device)

    monkeypatch.setattr(StateTracking, "sequences", counted)
    sequences = TrainingSequences(task, 5, CPU)
    batches = [sequences.batch(step) for step in range(27)]
    assert max(asked) == 64
    found = [tuple(row) for batch in batches for row in full(batch, 8).tokens_BT.tolist()]
    expected = [tuple(row) for row in generate(task, "train", 5, 0, 216, CPU).tokens_BT.tolist()]
    assert sorted(found) == sorted(expected)
    assert (found == expected) == (not buckets)
    for step in (26, 0, 9):
        again = TrainingSequences(task, 5, CPU).batch(step)
        assert torch.equal(again.tokens_BT, batches[step].tokens_BT)
        assert not torch.equal(full(TrainingSequences(task, 6, CPU).batch(step), 8).tokens_BT, full(again, 8).tokens_BT)


def full(batch, width):
    """Pad strings that have a label at each symbol to one width."""
    parts: Any = (pad(part, (0, width - part.shape[1])) if part is not None else None for part in batch[:4])
    return Batch(*parts)


@pytest.mark.parametrize("name", ["parity", "mod_arithmetic", "mod_arithmetic_brackets", "copy"])
def test_batches_of_length_buckets_have_few_shapes_little_padding_and_every_label(name):
    sizes = {"batch_size": 16, "num_steps": 100, "max_length": 40}
    task = copy_task(Bucketed, **sizes) if name == "copy" else state_task(name, length_buckets=True, **sizes)
    every = task.sequences("train", 5, 0, 1600, CPU)
    longest = every.tokens_BT.shape[1]
    seeds = [TrainingSequences(task, seed, CPU) for seed in (5, 6)]
    batches: list[Any] = [seeds[0].batch(step).wide() for step in range(100)]
    shapes = [batch.tokens_BT.shape[1] for batch in batches]
    assert len(set(shapes)) <= NUM_BUCKETS
    # Where a bucket ends, two seeds may differ by one batch.
    differing = sum(seeds[1].batch(step).tokens_BT.shape[1] != shape for step, shape in enumerate(shapes))
    assert differing <= 2 * NUM_BUCKETS
    assert sum(batch.weight_BT.sum() for batch in batches) == every.weight_BT.sum()
    last_B = (every.weight_BT * (every.positions_BL + 1)).amax(1)
    assert seeds[0].mean_length == pytest.approx(float(last_B.mean()))
    assert sum(shapes) / 100 < float(last_B.mean()) + longest / NUM_BUCKETS
    # Sorted, so that a batch's neighbours are near it; all lengths take turns.
    assert shapes != sorted(shapes)
    found = [
        row[:length] for batch in batches for row, length in zip(batch.tokens_BT.tolist(), ends_of(batch), strict=True)
    ]
    expected = [row[:length] for row, length in zip(every.tokens_BT.tolist(), ends_of(every), strict=True)]
    assert sorted(found) == sorted(expected)


def ends_of(batch):
    positions_BL = batch.positions_BL
    if positions_BL is None:
        positions_BL = torch.arange(batch.targets_BT.shape[1]).expand_as(batch.targets_BT)
    return (batch.weight_BT * (positions_BL + 1)).amax(1).long().tolist()


def test_labels_that_move_away_from_every_position_are_noticed(streamed, monkeypatch):
    generate = StateTracking.sequences

    def moved(self, split, seed, start, count, device):
        batch: Any = generate(self, split, seed, start, count, device)
        return batch._replace(positions_BL=batch.positions_BL.flip(1)) if start else batch

    monkeypatch.setattr(StateTracking, "sequences", moved)
    sequences = TrainingSequences(state_task("parity", num_steps=27), 5, CPU)
    assert sequences.batch(7).positions_BL is None
    with pytest.raises(ValueError, match="stand elsewhere"):
        sequences.batch(8)
