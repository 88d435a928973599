"""Tasks after MAD: labels held against a reader that goes through each sequence symbol by symbol."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from probe_models import Answering
from probe_settings import probe_task

from attnbench.evals.lib.mad_rules import MAD_RULES
from attnbench.evals.lib.task_data import SPLITS
from attnbench.evals.mad import Mad

CPU = torch.device("cpu")
LENGTHS = {"fuzzy_recall": 60, "noisy_recall": 60, "compression": 12, "memorisation": 20, "memorise": 8}


def task(name, **options) -> Any:
    return probe_task("mad", **{"cells": [[name, LENGTHS[name]]], **options})


def noisy(tokens, facts):
    known, labels = {}, {}
    for place, (token, after) in enumerate(pairwise(tokens)):
        if token < 8:
            assert 8 <= after < 16
            if token in known:
                assert known[token] == after
                labels[place] = after
            known[token] = after
    return labels


def fuzzy(tokens, facts):
    known, labels, place = {}, {}, 0
    while place < len(tokens) and tokens[place] != 16:
        key = tuple(tokens[place : place + 1 + tokens[place] % 3])
        assert all(token < 8 for token in key)
        first = end = place + len(key)
        while end < len(tokens) and 8 <= tokens[end] < 16:
            end += 1
        value = tokens[first:end]
        assert 1 <= len(value) <= 3
        if key in known:
            assert known[key] == value
            labels |= {first + n - 1: token for n, token in enumerate(value)}
        known[key] = value
        place = end
    assert set(tokens[place:]) <= {16}
    assert len(known) <= 8
    return labels


def compressed(tokens, facts):
    kept, asked = tokens[:12], tokens[13:]
    assert tokens[12] == 16
    assert sorted(asked) == list(range(17, 29))
    return {13 + n: kept[token - 17] for n, token in enumerate(asked)}


def memorised(tokens, facts):
    assert set(tokens[1::2]) == {256}
    return {place: facts[tokens[place - 1]] for place in range(1, len(tokens), 2)}


NAIVE = {"fuzzy_recall": fuzzy, "noisy_recall": noisy, "compression": compressed, "memorisation": memorised}


def labels_of(batch):
    for tokens, targets, weight, positions in zip(*map(torch.Tensor.tolist, batch[:4]), strict=True):
        yield tokens, {p: t for p, t, w in zip(positions, targets, weight, strict=True) if w}, sum(weight)


@pytest.mark.parametrize("name", NAIVE)
def test_every_label_is_what_a_reader_finds_and_no_other(name):
    assert set(NAIVE) == set(MAD_RULES)
    facts = {}
    for split in SPLITS:
        batch = task(name).sequences(split, 4, 0, 300, CPU)
        assert int(batch.tokens_BT.max()) < task(name).vocabulary_size
        for tokens, labels, count in labels_of(batch):
            if name == "memorisation":
                for place, value in labels.items():
                    assert facts.setdefault(tokens[place - 1], value) == value
                    assert 128 <= value < 256
            assert labels == NAIVE[name](tokens, facts)
            assert len(labels) == count > 0


def test_facts_are_a_function_of_the_seed_alone():
    batches = [task("memorisation").sequences("train", seed, 0, 300, CPU) for seed in (1, 2)]
    facts = [
        {tokens[place - 1]: value for tokens, labels, _ in labels_of(batch) for place, value in labels.items()}
        for batch in batches
    ]
    assert len(facts[0]) == 128
    assert sum(facts[0][key] == facts[1][key] for key in facts[0]) < 10


def test_noise_takes_a_fifth_of_the_units():
    tokens_BT = task("noisy_recall").sequences("train", 0, 0, 2000, CPU).tokens_BT
    # A pair has two symbols: 1 / (1 + 2 × 4) of the symbols.
    assert float((tokens_BT >= 16).double().mean()) == pytest.approx(1 / 9, abs=0.01)


def test_only_labels_are_counted():
    own = task("compression", num_test=200)
    [row] = own.score(Answering(300, lambda _: 0), 0, CPU)
    targets_BL = own.sequences("test", 0, 0, 200, CPU).targets_BT
    assert row.value == pytest.approx(float((targets_BL == 0).double().mean()))
    assert (row.num_samples, row.settings["chance"]) == (200 * 12, 1 / 16)
    own = task("noisy_recall", num_test=200)
    [row] = own.score(Answering(300, lambda _: 0), 0, CPU)
    assert row.num_samples == int(own.sequences("test", 0, 0, 200, CPU).weight_BT.sum())
    assert [(row.metric, row.settings)] == own.axes()


def memorise(num_symbols=256, **options):
    return task("memorise", cells=[["memorise", 8, num_symbols]], **options)


def test_a_string_of_memorise_asks_for_the_value_of_each_key():
    tokens, targets, weight, positions = (
        part[0].tolist() for part in memorise(11).sequences("train", 3, 4, 1, CPU)[:4]
    )
    # Keys 0 to 4, values 5 to 9; 10 asks for the value.
    assert tokens == [0, 10, 2, 10, 3, 10, 2, 10]
    assert targets == [8, 7, 9, 7]
    assert (positions, weight) == ([1, 3, 5, 7], [1, 1, 1, 1])


@pytest.mark.parametrize("num_symbols", [11, 256, 512])
def test_memorise_has_a_value_of_its_own_for_each_key_in_all_splits(num_symbols):
    own, facts = memorise(num_symbols), {}
    num_keys = (num_symbols - 1) // 2
    assert own.vocabulary_size == num_symbols
    for split in SPLITS:
        for tokens, labels, _ in labels_of(own.sequences(split, 4, 0, 800, CPU)):
            assert set(tokens[1::2]) == {num_symbols - 1}
            assert labels == {place: facts.setdefault(tokens[place - 1], labels[place]) for place in (1, 3, 5, 7)}
    assert set(facts) == set(range(num_keys))
    assert len(set(facts.values())) == num_keys
    assert set(facts.values()) <= set(range(num_keys, num_symbols - 1))
    others = own.sequences("train", 5, 0, 300, CPU)
    assert any(
        facts[tokens[place - 1]] != value for tokens, labels, _ in labels_of(others) for place, value in labels.items()
    )


def knowing(facts):
    """Know the values of some keys, and answer 0 to the others."""
    return Answering(300, lambda tokens: facts.get(tokens[-2], 0))


def test_the_macro_accuracy_of_memorise_gives_each_key_the_same_weight():
    own = memorise(11, num_test=200)
    batch = own.sequences("test", 0, 0, 200, CPU)
    facts = {t[p - 1]: value for t, labels, _ in labels_of(batch) for p, value in labels.items()}
    micro, macro = own.score(knowing({key: facts[key] for key in (0, 1)}), 0, CPU)
    assert (micro.metric, macro.metric) == ("accuracy", "macro_accuracy")
    assert macro.value == pytest.approx(2 / 5)
    assert micro.value == pytest.approx(float((batch.tokens_BT[:, ::2] < 2).double().mean()))
    assert [(row.metric, row.settings) for row in (micro, macro)] == own.axes()
    # A constant answer, which is the value of key 3.
    constant = list(own.score(knowing(dict.fromkeys(range(5), facts[3])), 0, CPU))
    assert constant[1].value == pytest.approx(constant[1].settings["chance"]) == pytest.approx(1 / 5)


def test_a_row_of_memorise_names_its_symbols_and_its_few_strings():
    own = memorise(512, num_train=256, batch_size=128)
    assert own.settings == {"rule": "memorise", "symbols": 512}
    assert own.num_train_sequences == 256
    content = own.content()
    assert (content["vocabulary_size"], content["length"]) == (512, 8)
    assert own.content() != memorise(513, num_train=256, batch_size=128).content()
    both = Mad(**{**Mad.smoke, "cells": [["memorise", 8, 16], ["memorise", 8, 32]]}).tasks()
    assert [it.vocabulary_size for it in both] == [16, 32]
