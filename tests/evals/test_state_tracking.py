"""State tracking: each rule held against one that reads the symbols of a string by themselves, slowly."""

from itertools import permutations
from typing import Any

import pytest
import torch
from probe_settings import probe_settings, probe_task

from attnbench.data.counters import hashed
from attnbench.evals.lib.sequences import TrainingSequences
from attnbench.evals.lib.state_rules import RULES, Strings, labelled
from attnbench.evals.lib.task_data import SPLITS
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.training.checkpoint import TrainState, load_last, save_step
from attnbench.training.loop import train
from attnbench.training.stack import Member, StackedTensors, train_stack
from attnbench.training.step import update

CPU = torch.device("cpu")
SYMBOLS = [*"01234", *"+-*()"]
"""Symbols of arithmetic modulo 5 as Python writes them."""


def task(rule, **options) -> Any:
    return probe_task("state_tracking", **{"rules": [rule], "max_length": 9, **options})


def parity(tokens):
    return {place: tokens[: place + 1].count(1) % 2 for place in range(len(tokens))}


def composed(tokens, group):
    """Number of the arrangement that moving beads about comes to: x takes what lies at place p to place x[p]."""
    beads, found = list(range(len(group[0]))), {}
    for place, token in enumerate(tokens):
        moved = [0] * len(beads)
        for at, bead in enumerate(beads):
            moved[group[token][at]] = bead
        beads = moved
        found[place] = group.index(tuple(beads.index(bead) for bead in range(len(beads))))
    return found


def value(text):
    return eval(text, {"__builtins__": {}}) % 5


def arithmetic(tokens):
    text = "".join(SYMBOLS[token] for token in tokens)
    return {place: value(text[: place + 1]) for place in range(0, len(text), 2)}


def bracketed(tokens):
    text, opened, found = "".join(SYMBOLS[token] for token in tokens), [], {}
    for place, symbol in enumerate(text):
        if symbol == "(":
            opened.append(place)
        elif symbol == ")":
            found[place] = value(text[opened.pop() : place + 1])
    assert not opened
    return found


def alternating():
    """Products of two exchanges, and of those again: the even permutations."""
    exchanges = [tuple({a: b, b: a}.get(i, i) for i in range(5)) for a in range(5) for b in range(a)]
    pairs = {tuple(p[q[i]] for i in range(5)) for p in exchanges for q in exchanges}
    return sorted({tuple(p[q[i]] for i in range(5)) for p in pairs for q in pairs})


SYMMETRIC = {degree: sorted(permutations(range(degree))) for degree in (3, 4, 5)}
NAIVE = {
    "parity": parity,
    "mod_arithmetic": arithmetic,
    "mod_arithmetic_brackets": bracketed,
    "s3": lambda tokens: composed(tokens, SYMMETRIC[3]),
    "s4": lambda tokens: composed(tokens, SYMMETRIC[4]),
    "a5": lambda tokens: composed(tokens, alternating()),
    "s5": lambda tokens: composed(tokens, SYMMETRIC[5]),
    "s5_swaps": lambda tokens: composed(tokens, SYMMETRIC[5]),
}
"""From a string's symbols to the state by position, of each rule."""

WIDTH = {"mod_arithmetic": lambda n: 2 * n - 1, "mod_arithmetic_brackets": lambda n: 4 * n + 1}
"""Positions of n labels, where not n."""


def test_every_rule_is_held():
    assert set(NAIVE) == set(RULES)
    assert [len(alternating()), RULES["a5"].num_states, RULES["s5"].num_states] == [60, 60, 120]


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize("split", SPLITS)
def test_a_string_s_labels_are_the_states_that_its_symbols_lead_to(name, split):
    positions_of = WIDTH.get(name, lambda n: n)
    batch = task(name).sequences(split, 3, 0, 60, CPU)
    assert batch.tokens_BT.shape == (60, positions_of(9))
    assert int(batch.tokens_BT.max()) < task(name).vocabulary_size
    lengths = set()
    for tokens, targets, weight, positions in zip(*map(torch.Tensor.tolist, batch[:4]), strict=True):
        length = int(sum(weight))
        lengths.add(length)
        assert weight == [1.0] * length + [0.0] * (9 - length)
        states = NAIVE[name](tokens[: positions_of(length)])
        assert dict(zip(positions[:length], targets, strict=False)) == states
        assert positions[:length] == sorted(states)
        assert set(tokens[positions_of(length) :]) <= {0}
    assert lengths == set(range(3, 10))


@pytest.mark.parametrize("name", NAIVE)
def test_test_strings_are_of_one_length_and_as_long_as_asked(name):
    batch = task(name, num_test=20).test_sequences(0, 72, CPU)
    assert batch.weight_BT.shape == (20, 72)
    assert (batch.weight_BT == 1).all()
    for tokens, targets, positions in zip(
        batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.positions_BL.tolist(), strict=True
    ):
        assert NAIVE[name](tokens) == dict(zip(positions, targets, strict=True))


@pytest.mark.parametrize("special_symbols", [0, 7])
@pytest.mark.parametrize("name", NAIVE)
def test_the_answer_alone_is_labelled_behind_the_last_step_or_an_equals_sign(name, special_symbols):
    own = task(name, labels="answer", special_symbols=special_symbols)
    rule, begins = RULES[name], bool(special_symbols)
    batch = own.sequences("train", 3, 0, 60, CPU)
    assert batch.tokens_BT.shape == (60, WIDTH.get(name, lambda n: n)(9) + rule.takes_equals + begins)
    assert own.vocabulary_size == rule.num_symbols + rule.takes_equals + special_symbols
    for tokens, [target], [weight], [position] in zip(*map(torch.Tensor.tolist, batch[:4]), strict=True):
        read = tokens[begins : position + 1]
        assert not begins or tokens[0] == rule.num_symbols + rule.takes_equals
        assert not rule.takes_equals or read.pop() == rule.num_symbols
        states = NAIVE[name](read)
        assert (target, weight) == (states[max(states)], 1.0)
        assert set(tokens[position + 1 :]) <= {0}


def test_strings_written_by_hand():
    """Of 3 + 4 * 2 - 1 the answer is 0 modulo 5; of the bits 0 1 1 0 1 it is 1."""
    numbers = torch.tensor([[3, 5, 4, 7, 2, 6, 1]])
    states, positions = torch.tensor([[3, 2, 1, 0]]), torch.tensor([[0, 2, 4, 6]])
    arithmetic = Strings(numbers, states, positions)
    batch = labelled(RULES["mod_arithmetic"], arithmetic, torch.tensor([4]), answer_alone=True, first=9)
    assert batch.tokens_BT.tolist() == [[9, 3, 5, 4, 7, 2, 6, 1, 8]]
    assert (batch.targets_BT.tolist(), batch.positions_BL.tolist()) == ([[0]], [[8]])
    bits = Strings(torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([[0, 1, 0, 0, 1]]), torch.arange(5)[None])
    batch = labelled(RULES["parity"], bits, torch.tensor([5]), answer_alone=True, first=None)
    assert (batch.targets_BT.tolist(), batch.positions_BL.tolist()) == ([[1]], [[4]])


def test_a_range_of_test_lengths_has_each_length_and_whole_strings_are_scored():
    own = task("parity", labels="answer", multiples=[1], test_range=[10, 29], whole_strings=True, num_test=40)
    positions = own.test_sequences(0, [10, 29], CPU).positions_BL.flatten()
    assert positions.bincount()[9:].tolist() == [2] * 20
    rows = list(own.score(Wrong(), 0, CPU))
    assert [(row.metric, row.settings) for row in rows] == own.axes()
    assert [row.settings.get("length", row.settings.get("lengths")) for row in rows] == [9, 9, "10-29", "10-29"]
    # Its only label is the first of a sequence, which Wrong tells rightly.
    assert [row.value for row in rows] == [1.0] * 4
    every = list(task("parity", max_length=8, multiples=[1], whole_strings=True).score(Wrong(), 0, CPU))
    assert [row.value for row in every] == [0.75, 0.0, 0.0]


@pytest.mark.parametrize("name", NAIVE)
def test_former_options_are_not_in_the_identity_of_a_training(name):
    assert not {"labels", "test_range", "whole_strings", "special_symbols"} & task(name).content().keys()
    assert task(name, labels="answer").content()["labels"] == "answer"


def test_strings_with_one_label_are_put_into_buckets_by_their_positions():
    own = task("parity", labels="answer", max_length=40, length_buckets=True, num_steps=64, batch_size=32)
    data = TrainingSequences(own, 0, CPU)
    widths = {batch.tokens_BT.shape[1] for batch in map(data.batch, range(64))}
    assert len(widths) > 4
    assert all(int(batch.positions_BL.max()) < batch.tokens_BT.shape[1] for batch in map(data.batch, range(64)))


def test_a_fixed_set_of_strings_is_taken_in_a_new_order_every_epoch():
    own = task("s3", num_train=24, num_steps=9, batch_size=8)
    data = TrainingSequences(own, 0, CPU)
    epochs = [torch.cat([data.batch(3 * epoch + step).tokens_BT for step in range(3)]).tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert "num_train" not in own.content()
    assert (own.content()["num_train_sequences"], task("s3").content()["num_train_sequences"]) == (24, 80)


def test_swaps_move_two_points_or_none_and_all_alike():
    tokens = task("s5_swaps").test_sequences(0, 9, CPU).tokens_BT.flatten()
    moved = {n: sum(i != p for i, p in enumerate(SYMMETRIC[5][n])) for n in set(tokens.tolist())}
    assert sorted(moved.values()) == [0] + [2] * 10


def test_all_trees_of_brackets_are_equally_likely():
    strings = RULES["mod_arithmetic_brackets"].strings(
        hashed(0, torch.arange(14_000)), torch.full((14_000,), 4), longest=4
    )
    shapes = {}
    for tokens in strings.tokens_BT.tolist():
        shape = "".join("n" if token < 5 else "" if token < 8 else SYMBOLS[token] for token in tokens)
        shapes[shape] = shapes.get(shape, 0) + 1
    assert len(shapes) == 14
    assert all(abs(count - 1000) < 5 * 31 for count in shapes.values()), shapes


class Wrong(torch.nn.Module):
    """Answers parity, but wrongly in the last quarter."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 1)

    def forward(self, tokens_BT, state=None, positions_BL=None):
        states_BL = (tokens_BT.cumsum(1) % 2).gather(1, positions_BL)
        late = torch.arange(states_BL.shape[1]) >= states_BL.shape[1] * 3 / 4
        return torch.nn.functional.one_hot((states_BL + late) % 2, 2).float(), None


def test_the_last_quarter_is_scored_apart():
    own = task("parity", max_length=8, multiples=[1, 2])
    rows = list(own.score(Wrong(), 0, CPU))
    assert [(row.metric, row.settings) for row in rows] == own.axes()
    found = {(row.settings["length"], row.settings["positions"]): row for row in rows}
    for length in (8, 16):
        everywhere, late = found[length, "all"], found[length, "last_quarter"]
        assert (everywhere.value, late.value) == (0.75, 0.0)
        assert (everywhere.num_samples, late.num_samples) == (16 * length, 16 * length // 4)
        assert late.settings["chance"] == 0.5
    taken = [row for row in rows if own.primary.takes(row.metric, row.settings)]
    assert taken == [found[16, "last_quarter"]]


@pytest.mark.parametrize("rule", ["parity", "s3", "mod_arithmetic", "mod_arithmetic_brackets"])
def test_chance_is_the_share_of_the_most_frequent_state(rule):
    own = task(rule, max_length=12, multiples=[2], num_test=2000)
    batch = own.test_sequences(0, 24, CPU)
    late_BL = batch.targets_BT[:, 18:]
    share = float(late_BL.flatten().bincount().max()) / late_BL.numel()
    assert share == pytest.approx(RULES[rule].chance, abs=0.015)


def trained(folder, num_steps, rate, seeds, **changed):
    """Accuracies on validation strings after so many steps, in a stack."""
    device = torch.device(changed.pop("device", "cpu"))
    words = ["attn.negative_eigenvalues=true", f"device={device}"]
    changed = {f"state_tracking_{name}": value for name, value in {"num_steps": num_steps, **changed}.items()}
    settings = probe_settings(folder, *words, attn="deltanet", name="state_tracking", **changed)
    first = prepare_probe(settings, settings.evaluations[0])[1][0]
    jobs = [first.at(rate, seed) for seed in seeds]
    members = [
        Member(
            state=TrainState.fresh(job.build()),
            batches=TrainingSequences(job.task, job.settings.seed, device).batch,
            settings=job.train,
            num_steps=num_steps,
            hooks=[],
        )
        for job in jobs
    ]
    list(train_stack(members, precision=first.precision, captured=device.type == "cuda"))
    return [job.selection(member.state) for job, member in zip(jobs, members, strict=True)]


@pytest.mark.parametrize(
    ("precision", "buckets"), [pytest.param("float32", False, marks=pytest.mark.slow), ("bfloat16", True)]
)
def test_short_parity_is_learned_in_bfloat16_and_in_buckets_as_in_float32(precision, buckets, tmp_path):
    options = {"width": 16, "head_width": 16, "batch_size": 32, "max_length": 8, "length_buckets": buckets}
    [accuracy] = trained(tmp_path, 150, 1e-2, [0], precision=precision, **options)
    assert accuracy > 0.9


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_stacked", [0, 2])
def test_weights_and_moments_in_bfloat16_learn_alone_and_in_a_stack(num_stacked, device, tmp_path):
    words = {"precision": "bfloat16_weights", "num_steps": 60, "max_length": 8, "clip_norm": 0}
    words |= {"width": 32, "head_width": 16}
    changed = {f"state_tracking_{name}": value for name, value in words.items()}
    settings = probe_settings(
        tmp_path, "match=none", f"device={device}", attn="deltaproduct", name="state_tracking", **changed
    )
    [job] = prepare_probe(settings, settings.evaluations[0])[1]
    assert (job.precision, job.columns()["precision"]) == ("bfloat16", "bfloat16_weights")
    losses: list[float] = []
    states = [TrainState.fresh(job.build()) for _ in range(max(1, num_stacked))]
    data = TrainingSequences(job.task, 0, job.device)
    how = {"captured": device == "cuda"}
    of_all = {"batches": data.batch, "settings": job.train, "num_steps": 60}
    of_all |= {"hooks": [lambda _, report: losses.append(report.loss.item()), lambda *_: None]}
    if num_stacked:
        list(train_stack([Member(state=state, **of_all) for state in states], precision=job.precision, **how))
    else:
        train(states[0], data.batch, job.train, precision=job.precision, num_steps=60, hooks=of_all["hooks"], **how)
    for state in states:
        tensors = [*state.model.parameters(), *state.first_moment.values(), *state.second_moment.values()]
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        assert {tensor.dtype for tensor in state.update_count.values()} == {torch.float32}
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    save_step(tmp_path / "checkpoint", states[0], job.record())
    resumed = load_last(tmp_path / "checkpoint", job.build())
    assert resumed is not None
    for name, tensor in resumed.model.named_parameters():
        torch.testing.assert_close(tensor, dict(states[0].model.named_parameters())[name], rtol=0, atol=0)
        torch.testing.assert_close(resumed.second_moment[name], states[0].second_moment[name], rtol=0, atol=0)


def test_stacked_weights_in_bfloat16_move_as_those_of_one_training(tmp_path):
    changed = {"state_tracking_precision": "bfloat16_weights", "state_tracking_clip_norm": 0}
    settings = probe_settings(tmp_path, name="state_tracking", **changed)
    [job] = prepare_probe(settings, settings.evaluations[0])[1]
    alone, *members = (TrainState.fresh(job.build()) for _ in range(3))
    stacked, rate = StackedTensors(members, job.train.weight_decay), torch.tensor(1e-2)
    for step in range(5):
        made = torch.Generator().manual_seed(step)
        gradients = {
            name: torch.randn(tensor.shape, generator=made).bfloat16() for name, tensor in alone.first_moment.items()
        }
        update(alone, gradients, torch.ones(()), rate, job.train)
        both = [torch.stack([gradients[name]] * 2) for name in stacked.parameters]
        stacked.update(both, rate.expand(2), torch.tensor([False, False]), job.train)
    for name, tensor in alone.model.named_parameters():
        for state in members:
            other = dict(state.model.named_parameters())[name]
            # Two neighbouring numbers differ by 2^-8 of the larger one.
            torch.testing.assert_close(other, tensor, rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("buckets", [False, True])
def test_parity_of_the_published_shape_is_learned_in_bfloat16_as_in_float32(buckets, tmp_path):
    shape = {"width": 128, "num_layers": 2, "head_width": 32, "feed_forward_width": 512, "batch_size": 256}
    options = {**shape, "max_length": 40, "device": "cuda", "length_buckets": buckets}
    for precision in ("float32", "bfloat16"):
        accuracies = trained(tmp_path, 2000, 1e-3, range(4), precision=precision, **options)
        assert sorted(accuracies)[1] > 0.95, (precision, accuracies)
