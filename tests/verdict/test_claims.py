"""Decisions of claims from rows: the nine words, their reasons, and what no claim may say."""

from typing import Any

import pytest
from claims import contrast, finding
from made_rows import row, rows_of

from attnbench.report.findings_page import findings_table, legend
from attnbench.settings.errors import UserError
from attnbench.verdict.claims import (
    CONTRADICTED,
    DISPUTED,
    IN_ORDER,
    NOT_REACHED,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    SMALLER,
    UNDECIDED,
    WORDS,
    ControlScores,
    Decision,
    control_scores,
    decide,
)

GOOD, BAD = [1.0] * 10, [0.1] * 10
CLOSE: dict[str, Any] = {"tier": "reduced", "differences": ["a smaller width"]}


def control(*scores: float | None, threshold: float = 0.95) -> ControlScores:
    return ControlScores(name="copy lstm", rate=1e-3, scores=[*scores], threshold=threshold, scaled=False, least=2)


def decided(*contrasts, softmax=GOOD, linear=BAD, controls=(), trained=None, **claim) -> Decision:
    rows = [*rows_of("softmax", *softmax), *rows_of("linear", *linear)]
    if trained is not None:
        rows += [row("softmax", seed, "selection", it, settings={"split": "validation"}) for seed, it in
                 enumerate(trained)]  # fmt: skip
    return decide(finding(*contrasts, **claim), controls, rows)


NONE, BOTH = contrast("existence", "linear", claimed=False), contrast("difference", "softmax", "linear")
CONTRASTS = (contrast(), NONE, BOTH)


@pytest.mark.parametrize(
    ("given", "word", "reason"),
    [
        ({}, REPRODUCED, "every contrast holds"),
        (CLOSE, SMALLER, "every contrast holds"),
        ({"softmax": [1.0] + [0.1] * 9}, NOT_REPRODUCED, "not reproduced: share of seeds of softmax"),
        ({"softmax": BAD, **CLOSE}, NOT_REPRODUCED, "not reproduced in a setting smaller than the source's: "),
        ({"softmax": BAD, "where": "in the code's batch"}, NOT_REPRODUCED, "not reproduced in the code's batch: "),
        ({"linear": [1.0] * 2 + [0.1] * 8}, CONTRADICTED, "(claimed: none): 0.2 ["),
        ({"softmax": [1.0] * 2 + [0.1] * 8}, UNDECIDED, " seeds needed: share of seeds of softmax less that of linear"),
        ({"softmax": [0.1] * 5, "linear": [0.1] * 5}, UNDECIDED, " seeds needed: "),
        ({"disputed": "Two papers differ"}, DISPUTED, "Two papers differ"),
        ({"softmax": [1.0] * 9}, NOT_RUN, "softmax has no symbol_accuracy of 1 of 10 seeds"),
        ({"controls": [control(0.96, 0.5, None)], "disputed": "it is"}, NOT_REACHED,
         "control copy lstm at rate 0.001: validation accuracy 0.960, 0.500, diverged; 1 of 3 reach 0.95, 2 asked"),
        ({"controls": [control(0.96, 0.97, 0.1)]}, REPRODUCED, "every contrast holds"),
        ({"trained": [0.999] * 2 + [0.5] * 8, "trained_range": 0.99}, REPRODUCED, "every contrast holds"),
        ({"trained": [0.999] + [0.5] * 9, "trained_range": 0.99}, NOT_REACHED, "is 0.99 or more at 1 of 10 seeds, 2 "),
    ],
)  # fmt: skip
def test_a_word_and_its_reason(given, word, reason):
    found = decided(*CONTRASTS, **given)
    assert (found.word, reason in found.reason) == (word, True), found.line
    assert found.line == f"little: {word}: {found.reason}"
    assert bool(found.tested) == (word not in (NOT_REACHED, NOT_RUN))


def test_a_value_that_is_off_is_reproduced_in_order_alone():
    order, value = contrast("order", "softmax", "linear"), contrast("value", published=0.8, margin=0.05)
    assert decided(order, value, softmax=[0.8] * 10).word == REPRODUCED
    assert decided(order, value).word == IN_ORDER
    assert decided(order, value, **CLOSE).word == IN_ORDER
    # Without anything besides there is no order that could hold.
    assert decided(value).word == NOT_REPRODUCED
    assert decided(value, softmax=[0.2, 1.0] * 5).word == UNDECIDED


def test_orders_hold_together_if_four_of_five_are_significant_and_all_have_the_sign():
    pair = contrast("order", "softmax", "linear")
    weak = contrast("order", "softmax", "linear", settings={"length": 60})
    scores = [0.5, 0.6, 0.4, 0.7, 0.55]
    more = [row(name, seed, value=it + (0.01 if name == "softmax" else 0), settings={"length": 60})
            for name in ("softmax", "linear") for seed, it in enumerate(scores)]  # fmt: skip
    given = [*rows_of("softmax", *[1.0] * 5), *rows_of("linear", *[0.1] * 5), *more]
    assert decide(finding(*[pair] * 4, weak), [], given).word == REPRODUCED
    assert decide(finding(*[pair] * 3, weak), [], given).word == UNDECIDED
    turned = contrast("order", "linear", "softmax", settings={"length": 60})
    assert decide(finding(*[pair] * 4, turned), [], given).word == UNDECIDED
    assert decide(finding(contrast("order", "linear", "softmax")), [], given).word == CONTRADICTED


def test_p_values_are_adjusted_over_the_claim():
    # 4 of 10 against none has p = 0.043.
    some = [1.0] * 4 + [0.1] * 6
    assert decided(BOTH, softmax=some).word == REPRODUCED
    twice = decided(BOTH, {**BOTH, "threshold": 0.95}, softmax=some)
    assert twice.word == UNDECIDED
    assert [it.adjusted for it in twice.tested] == [pytest.approx(2 * 0.0433, abs=1e-3)] * 2


def test_scores_are_scaled_by_the_chance_of_their_row():
    rows = [row(seed=seed, value=0.97, settings={"length": 50, "chance": 0.5}) for seed in range(10)]
    decision = decide(finding(contrast(scaled=True, threshold=0.94)), [], rows)
    assert decision.word == REPRODUCED
    assert decision.score_texts == [
        f"softmax, symbol accuracy (chance-scaled), length 50: mean 0.940, by seed {', '.join(['0.940'] * 10)}"
    ]
    assert decide(finding(contrast(scaled=True, threshold=0.95)), [], rows).word == NOT_REPRODUCED
    asked = finding(controls=[{"variant": "lstm", "threshold": 0.95, "scaled": True}])
    assert asked.claim is not None
    [settings] = asked.claim.controls
    assert control_scores(settings, "lstm", 0.1, [0.97, 0.98, None], 0.5).scores == pytest.approx([0.94, 0.96, None])
    assert not control_scores(settings, "lstm", 0.1, [0.97, 0.98, None], 0.5).is_held
    assert control_scores(settings, "lstm", 0.1, [0.99, 0.98, None], 0.5).is_held
    assert asked.unscored == {"lstm"}


def test_a_contrast_that_fits_several_figures_is_refused():
    rows = [*rows_of("softmax", *GOOD), *rows_of("softmax", *GOOD, settings={"length": 50, "beyond_training": True})]
    with pytest.raises(UserError, match="was measured at each of"):
        decide(finding(), [], rows)
    with pytest.raises(UserError, match="scaled=true: rows of symbol_accuracy of softmax name no chance"):
        decide(finding(contrast(scaled=True)), [], rows_of("softmax", *GOOD))


def test_a_seed_that_diverged_has_not_learned_the_trained_lengths_and_scores_as_chance():
    chance = {"length": 50, "chance": 0.1}
    lost = {"value": None, "of": {"status": "diverged", "reason": "nan"}}
    rows = [row(seed=seed, settings=chance, **(lost if seed > 1 else {"value": 1.0})) for seed in range(10)]
    validation = {"metric": "selection", "settings": {"split": "validation"}}
    rows += [row(seed=seed, **validation, **(lost if seed > 1 else {"value": 1.0})) for seed in range(10)]
    found = decide(finding(trained_range=0.99), [], rows)
    assert (found.word, found.tested[0].found.words) == (REPRODUCED, "2 of 10 seeds")
    found = decide(
        finding(trained_range=0.99), [], [it for it in rows if it.identity.seed or it.measurement.metric != "selection"]
    )
    assert found.word == NOT_REACHED


def test_every_row_of_the_table_has_one_of_nine_words_and_a_failed_control_nothing_else():
    decisions = [decided(*CONTRASTS), decided(controls=[control(0.1, 0.1, 0.1)]), decided(softmax=[])]
    table = findings_table(decisions)
    assert len(WORDS) == 9
    for line, decision in zip(table.lines, decisions, strict=True):
        cells = dict(zip(table.headers, [getattr(it, "text", it) for it in line], strict=False))
        assert cells["word"] in WORDS
        assert cells["word"] == decision.word
        assert cells["command"] == "attnbench findings little"
        ours = line[table.headers.index("ours")]
        assert bool(ours) == bool(decision.tested)
        if any(not it.is_held for it in decision.controls):
            assert (cells["word"], ours, decision.tested) == (NOT_REACHED, "", ())
    assert "Not reached: a control failed" in legend(decisions)
    assert "Contradicted" not in legend(decisions)


@pytest.mark.parametrize(
    ("changed", "claim", "message"),
    [({"threshold": 1.5}, {}, r"threshold=1\.5: must be at most 1$"),
     ({"threshold": None}, {}, r"threshold=None: kind=existence takes one"),
     ({"variants": ["other"]}, {}, r"variants=\['other'\]: must be one of softmax, linear, lstm"),
     ({"variants": ["softmax", "linear"]}, {}, "kind=existence takes 1"),
     ({"kind": "difference"}, {}, r"variants=\['softmax'\]: kind=difference takes 2"),
     ({"kind": "value", "threshold": None}, {}, "published=None: kind=value takes one"),
     ({"kind": "best_of", "claimed": False}, {}, "claimed=false: kind=best_of takes true"),
     ({"kind": "beats"}, {}, "kind=beats: must be one of existence, difference"),
     ({"evaluation": "recall"}, {}, "evaluation=recall: must be one of copy"),
     ({}, {"contrasts": []}, "contrasts: a claim has at least one"),
     ({}, {"tier": "close"}, "tier=close lists all differences from the source"),
     ({}, {"differences": ["width 32"]}, "tier=exact lists none but device and seeds"),
     ({}, {"minutes": {"tpu": 1.0}}, "must be one of cpu, cuda"),
     ({}, {"controls": [{"variant": "gru", "threshold": 0.9}]}, r"controls\[0\]\.variant=gru: must be one of softmax"),
     ({}, {"controls": [{"variant": "lstm", "threshold": 0.9, "least": 4}]}, r"\[0\]\.least=4: must be at most 3"),
     ({}, {"control": []}, r"claim\.control=\[\]: unknown setting \(did you mean controls\?\)")],
)  # fmt: skip
def test_a_claim_that_cannot_be_tested_is_one_line(changed, claim, message):
    with pytest.raises(UserError, match=message) as refused:
        finding(contrast(**changed), **claim)
    assert "\n" not in str(refused.value)


def test_an_order_takes_five_seeds():
    few = {"probe_seeds": [0, 1, 2, 3]}
    with pytest.raises(UserError, match="kind=order takes at least 5 seeds"):
        finding(contrast("order", "softmax", "linear"), plan=few)
    finding(plan=few)
