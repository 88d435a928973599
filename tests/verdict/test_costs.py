"""Costs of scores, and the scores that are worth theirs."""

import dataclasses

import pytest
from made_rows import row

from attnbench.report.sections.answer import LEFT_OUT, by_state
from attnbench.results.metrics import Primary
from attnbench.results.rows import ResultRow
from attnbench.verdict.costs import frontier, priced
from attnbench.verdict.seeds import figures

RECALL = Primary(
    metric="accuracy", kind="accuracy", margin=0.01, settings={"split": "test"}, hardest=["num_pairs", "-width"]
)
CHANCE = 0.25


def scored(variant: str, accuracy: float, num_bytes: float | None, *, width: int = 64, num_pairs: int = 4):
    """Rows of recall: an accuracy and the bytes of its model's state, which nobody measured where they are None."""
    of_model = {"num_pairs": num_pairs, "width": width}
    of_score = {**of_model, "split": "test", "chance": CHANCE}
    measured = [("accuracy", accuracy, of_score), ("state_bytes", num_bytes, of_model)]
    return [made(variant, *it) for it in measured if it[1] is not None]


def made(variant: str, metric: str, value: float, settings: dict) -> ResultRow:
    identity = dataclasses.replace(row().identity, variant=variant, mixer="Softmax", evaluation="recall")
    return dataclasses.replace(row(metric=metric, value=value, settings=settings), identity=identity)


def points(*rows: list[ResultRow]):
    found = priced(figures([it for group in rows for it in group]), "recall", RECALL, "state_bytes")
    return [[(it.score.variant, it.value, it.price) for it in group] for group in found]


def test_at_one_width_the_hardest_setting_is_priced():
    one, two = scored("one", 0.9, 100), scored("two", 0.8, 200)
    harder = scored("one", 0.5, 150, num_pairs=8)
    assert points(one, two) == [[("one", 0.9, 100), ("two", 0.8, 200)]]
    assert points(one, two, harder) == [[("one", 0.5, 150)]]


def test_at_several_widths_every_setting_has_the_models_of_all():
    rows = [
        scored("one", accuracy, num_bytes, width=width, num_pairs=num_pairs)
        for accuracy, num_bytes, width, num_pairs in ((0.9, 100, 64, 4), (1.0, 400, 128, 4), (0.4, 150, 64, 8))
    ]
    assert points(*rows) == [[("one", 0.9, 100), ("one", 1.0, 400)], [("one", 0.4, 150)]]


def test_what_nobody_measured_the_cost_of_is_left_out():
    assert points(scored("one", 0.9, None), scored("two", 0.8, 200)) == [[("two", 0.8, 200)]]
    assert points(scored("one", 0.9, None)) == []
    assert points() == []


def test_against_time_variants_that_are_one_model_have_a_point_each():
    """Softmax and flash have one score, and are kernels of different speed."""
    primary = Primary(metric="nats_per_character", kind="nats", margin=0.01)
    score = made("softmax", "nats_per_character", 1.5, {"split": "test"})
    of_text = dataclasses.replace(score, identity=dataclasses.replace(score.identity, evaluation="perplexity"))
    speeds = [
        dataclasses.replace(
            made(name, "step_milliseconds", milliseconds, {"sequence_length": of_text.identity.seq_len}),
            identity=dataclasses.replace(of_text.identity, variant=name, evaluation="throughput"),
        )
        for name, milliseconds in (("softmax", 7.0), ("flash", 6.0))
    ]
    (group,) = priced(
        figures([of_text, *speeds], {"perplexity": {"flash": "softmax"}}), "perplexity", primary, "step_milliseconds"
    )
    assert [(it.score.variant, it.score.label, it.price) for it in group] == [
        ("softmax", "softmax", 7.0),
        ("flash", "flash", 6.0),
    ]
    assert {it.value for it in group} == {1.5}


def test_the_state_of_a_language_model_is_in_the_rows_of_its_training_and_no_probe_s():
    primary = Primary(metric="nats_per_character", kind="nats", margin=0.01)
    score = made("linear", "nats_per_character", 1.5, {"split": "test"})
    of_text = dataclasses.replace(score, identity=dataclasses.replace(score.identity, evaluation="perplexity"))
    state = made("linear", "state_bytes", 4096, {"split": "test"})
    state = dataclasses.replace(state, identity=dataclasses.replace(of_text.identity, evaluation="training"))
    (group,) = priced(figures([of_text, state]), "perplexity", primary, "state_bytes")
    assert [(it.value, it.price) for it in group] == [(1.5, 4096)]
    probe = made("linear", "accuracy", 0.9, {"split": "test"})
    probe = dataclasses.replace(probe, identity=dataclasses.replace(probe.identity, model="recall-64"))
    assert not priced(figures([probe, state]), "recall", RECALL, "state_bytes")


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        # In the order of their price, and each above all that cost less.
        ([("dear", 1.0, 900), ("cheap", 0.5, 100), ("worse", 0.4, 300)], ["cheap", "dear"]),
        # Within the margin of a cheaper one, or of one that costs as much.
        ([("cheap", 0.5, 100), ("near", 0.51, 200)], ["cheap"]),
        ([("cheap", 0.5, 100), ("apart", 0.52, 200)], ["cheap", "apart"]),
        ([("lower", 0.5, 100), ("higher", 0.7, 100), ("alike", 0.695, 100)], ["higher"]),
        # A difference of exactly the margin is within it, and equal scores that rounding tells apart are equal.
        ([("cheap", 0.3, 100), ("near", 0.1 + 0.2 + 0.01, 200)], ["cheap"]),
        ([("first", 0.3, 100), ("second", 0.1 + 0.2, 100)], ["first"]),
        ([("cheap", 0.5, 100), ("near", 0.509, 200), ("apart", 0.512, 300)], ["cheap", "apart"]),
        # What luck reaches costs nothing.
        ([("lucky", CHANCE + 0.005, 10), ("learned", 0.5, 100)], ["learned"]),
        ([("lucky", CHANCE, 10)], []),
    ],
)
def test_the_frontier_has_the_accuracies_that_are_worth_their_cost(scores, kept):
    (group,) = priced(figures([it for each in scores for it in scored(*each)]), "recall", RECALL, "state_bytes")
    found = frontier(group, RECALL)
    assert [point.score.variant for point in found] == kept
    for point in group:
        no_dearer = [it.value for it in found if it.price <= point.price]
        assert point.value <= max([CHANCE, *no_dearer]) + RECALL.margin + 1e-9


def said(*rows: list[ResultRow], primary: Primary = RECALL) -> list[str]:
    return by_state(figures([it for group in rows for it in group]), {"recall": primary})


def test_the_answer_says_it_a_sentence_a_setting():
    assert said(scored("one", 0.9, 100), scored("two", 0.95, 2000)) == [
        "Recall at pairs 4, width 64, best for its bytes of state: one 90 % with 100 bytes; two 95 % with 2,000 bytes.",
        LEFT_OUT,
    ]
    of_widths = scored("one", 0.9, 100), scored("one", 1.0, 400, width=128), scored("two", 0.8, 200, width=128)
    assert said(*of_widths) == [
        "Recall at pairs 4, best for its bytes of state: one at width 64 90 % with 100 bytes; one at width 128 100 % "
        "with 400 bytes.",
        LEFT_OUT,
    ]
    # Nothing to choose from, nothing that was learned, and no accuracy.
    assert said(scored("one", 0.9, 100), scored("two", 0.95, 100)) == []
    assert said(scored("one", CHANCE, 100), scored("two", CHANCE, 200)) == []
    nats = dataclasses.replace(RECALL, kind="nats")
    assert said(scored("one", 0.9, 100), scored("two", 0.95, 200), primary=nats) == []
