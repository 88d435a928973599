"""Rows of single seeds to figures and the summary."""

import math
import re

import pytest
from made_rows import IDENTITY, inputs_of, row, rows_of
from probe_settings import EVALUATIONS

from attnbench.report.sections import words
from attnbench.report.sections.scores import score_table, summary_table
from attnbench.report.terminal import print_comparison
from attnbench.results.rows import SELECTION_SEED, ResultRow
from attnbench.results.tables import NOTHING, to_markdown
from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF
from attnbench.verdict.seeds import figures, sittings_lead
from attnbench.verdict.statistics import share_interval
from attnbench.verdict.summary import evaluation_class, headline_columns, summary, verdicts_of

TEST_OF_BEST = {"split": "test", "checkpoint": "best", "sequence_length": 256}


def one(rows):
    (figure,) = figures(rows)
    return figure


def test_an_option_of_the_evaluation_that_differs_is_an_axis_and_one_that_does_not_is_none():
    def settings(steps):
        return {"length": 5, "evaluation_options": {"num_steps": steps, "batch_size": 8}, "mixer_options": {"a": steps}}

    rows = [*rows_of("a", 0.5, 0.6, settings=settings(500)), *rows_of("b", 0.9, settings=settings(500))]
    assert [figure.settings for figure in figures(rows)] == [{"length": 5}] * 2
    rows += rows_of("b", 0.95, settings=settings(1500))
    longer = [figure for figure in figures(rows) if figure.settings["num_steps"] == 1500]
    assert [(figure.variant, figure.mean, figure.settings) for figure in longer] == [
        ("b", 0.95, {"num_steps": 1500, "length": 5})
    ]
    # Rows kept without their options are at the place of those that have the usual ones.
    assert [figure.settings for figure in figures(rows_of("c", 0.5, settings={"length": 5}))] == [{"length": 5}]


def test_a_figure_is_the_mean_over_seeds_with_an_interval_inside_its_bounds():
    figure = one(rows_of("softmax", 0.1, 0.2, 0.3, of={"num_samples": 100}))
    assert figure.values == {0: 0.1, 1: 0.2, 2: 0.3}
    assert figure.mean == pytest.approx(0.2)
    assert (figure.low, figure.high) == pytest.approx(share_interval(0.6, 3))
    assert (figure.num_samples, figure.statuses, figure.reason) == (100, {"ok": 3}, "")
    # Of 60 of 300 items: far narrower than what three seeds allow to say.
    assert (figure.item_low, figure.item_high) == (pytest.approx(0.1563, abs=1e-3), pytest.approx(0.2497, abs=1e-3))
    # Of accuracies on validation data too, Student's would be [0.79, 1.13].
    selected = one(rows_of("softmax", 0.9, 0.98, 1.0, metric="selection"))
    assert (selected.low, selected.high) == pytest.approx(share_interval(2.88, 3))
    timed = one(rows_of("softmax", 1.0, 2.0, 3.0, metric="step_milliseconds"))
    assert timed.high - timed.mean == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)


def test_a_seed_that_diverged_counts_as_chance_where_its_row_names_one():
    diverged = {"status": "diverged", "reason": "at step 7"}
    settings = {"length": 50, "chance": 0.04}
    figure = one([row(value=0.9, settings=settings), row(seed=1, value=None, settings=settings, of=diverged)])
    assert (figure.values, figure.num_diverged) == ({0: 0.9, 1: 0.04}, 1)
    assert figure.mean == pytest.approx(0.47)
    # Steps to a threshold have no number where it was never reached; what is solved is a share.
    late = {"status": "not_reached", "reason": "selection was not 0.95"}
    given = {"metric": "steps_to_95", "settings": {"budget": 1500}}
    lost = [row(seed=1, value=None, of=diverged, **given), row(seed=2, value=None, of=late, **given)]
    some = one([row(value=300, **given), *lost])
    assert (some.values, words.outcome(some)) == ({0: 300}, "300 (not reached by 2 of 3 seeds)")
    assert words.outcome(one(lost)) == "diverged and not reached"
    assert words.outcome(one(lost[1:])) == "not reached"
    brief = {"status": "not_reached", "reason": "3 steps, and a training has a speed from 100 on"}
    assert words.outcome(one([row(metric="tokens_per_second", value=None, of=brief)])) == "not measured"
    solved = one([row(metric="solved", value=int(seed < 4), seed=seed) for seed in range(5)])
    assert (solved.mean, solved.low, solved.high) == pytest.approx((0.8, 0.2836, 0.9949), abs=1e-4)
    # Rows of nats that name no chance: what diverged has no number, and no verdict.
    lost = one([row(metric="nats_per_character", value=None, settings={"length": 50}, of=diverged)])
    assert (lost.values, lost.obstacle) == ({}, "diverged at 1 of 1 seeds")
    assert words.outcome(figure) == "0.5 (1 at chance of 2 seeds)"
    assert words.outcome(one(rows_of("softmax", 0.5, None, 0.7))) == "0.60 (2 of 3 seeds)"


def test_items_of_all_seeds_are_pooled_by_their_number():
    rows = [row(value=1.0, of={"num_samples": 10}), row(seed=1, value=0.0, of={"num_samples": 90})]
    figure = one(rows)
    assert figure.item_low < 0.1 < figure.item_high < 0.2
    assert figure.num_samples == 10
    unknown = one([rows[0], row(seed=1, value=0.0)])
    assert (unknown.item_low, unknown.num_samples) == (None, None)
    assert one([row(metric="step_milliseconds", of={"num_samples": 20})]).item_low is None


def test_a_single_seed_keeps_its_rows_own_interval():
    figure = one([row(metric="step_milliseconds", value=5.0, of={"low": 4.0, "high": 7.0, "num_samples": 20})])
    assert (figure.mean, figure.low, figure.high, figure.num_samples) == (5.0, 4.0, 7.0, 20)


def test_settings_of_the_run_are_no_axis_and_the_selection_seed_never_enters():
    assert figures([row(seed=SELECTION_SEED)]) == []
    assert one([row(seed=SELECTION_SEED, value=1.0), row(value=0.25)]).mean == 0.25
    settings = [{"length": 50, "learning_rate": rate, "rate_at_edge": rate > 0.02} for rate in (0.01, 0.03)]
    figure = one([row(seed=seed, settings=given) for seed, given in enumerate(settings)])
    assert figure.settings == {"length": 50}


def test_what_has_no_value_is_counted_and_explained():
    figure = one(rows_of("softmax", 0.5, None, 0.7))
    assert figure.values == {0: 0.5, 2: 0.7}
    assert (figure.statuses, figure.reason) == ({"ok": 2, "out_of_memory": 1}, "needs 90 GiB")
    failed = one([row(value=None)])
    assert (failed.mean, failed.low, failed.values) == (None, None, {})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"run": "again"},
            r"copy symbol_accuracy of softmax at .*length=50.*: seed 0 .* in softmax-seed0 and in again",
        ),
        ({"seed": 1, "precision": "bfloat16"}, r"differ in precision \(float32 in softmax-seed0, bfloat16 in"),
        ({"seed": 1, "backend": "fla"}, "differ in backend"),
        ({"variant": "linear", "corpus": "text"}, r"different corpora cannot be compared: \(none\), text"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(second, message):
    with pytest.raises(UserError, match=message):
        figures([row(), row(**second)])


def test_what_differs_between_machines_is_kept():
    figure = one([row(parameters=None), row(seed=1, device="gpu", environment="e1", commit="def")])
    assert (figure.identity.device, figure.identity.environment, figure.identity.commit) == (
        *("cpu, gpu", "e0, e1", "abc, def"),
    )
    assert figure.identity.parameters == IDENTITY.parameters


NAMES = ["softmax", "gated_deltanet", "linear"]
TEN = [
    *rows_of("softmax", *[0.99] * 10),
    *rows_of("gated_deltanet", *[0.91 + 0.001 * seed for seed in range(10)]),
    *rows_of("linear", *[0.7 + 0.002 * seed for seed in range(10)]),
]


def speed(variant, length, value, **settings):
    settings = {"sequence_length": length, "batch_size": 128, **settings}
    return row(variant, metric="tokens_per_second", value=value, settings=settings, evaluation="throughput")


def test_the_summary_shows_speed_at_the_longest_length_that_all_can_do():
    rows = [
        *(speed("softmax", length, value) for length, value in ((256, 9e5), (512, 8e5), (1024, None))),
        *(speed("linear", length, value) for length, value in ((256, 9e5), (512, 7e5), (1024, 6e5))),
        speed("linear", 2048, 5e5),
    ]
    shown = summary(figures(rows), [])
    assert headers(shown) == ["token/s at 512"]
    assert texts(shown) == {"softmax": ["800,000"], "linear": ["700,000"]}
    shown = summary(figures([speed("softmax", 256, None), speed("softmax", 512, None)]), [])
    assert texts(shown) == {"softmax": ["out of memory"]}


def headers(content):
    return [column.header for column in content.columns]


def texts(content):
    return {
        variant: [words.outcome(it.figure, in_table=True) if it.figure else NOTHING for it in entries]
        for variant, entries in content.lines.items()
    }


def test_the_summary_marks_who_is_better_than_all_others_at_the_primary_metric_alone():
    longer = {"length": 75, "beyond_training": True}
    over_seeds = figures([*TEN, *rows_of("softmax", 0.5, settings=longer), *rows_of("linear", 0.4, settings=longer)])
    shown = summary(over_seeds, verdicts_of(over_seeds, rank=NAMES, reference=None))
    assert headers(shown) == ["copy at 50", "copy at 75"]
    assert [name for name, entries in shown.lines.items() if entries[0].is_best] == ["softmax"]
    assert not any(entries[1].is_best or entries[1].verdict for entries in shown.lines.values())
    assert texts(shown)["gated_deltanet"] == ["0.915", "–"]
    against = summary(over_seeds, verdicts_of(over_seeds, rank=NAMES, reference="softmax"))
    assert {name: entries[0].verdict and entries[0].verdict.outcome for name, entries in against.lines.items()} == {
        "softmax": None,
        "gated_deltanet": "worse",
        "linear": "worse",
    }


def test_the_summary_marks_a_perplexity_by_the_verdict_on_its_nats():
    rows = [
        one_row
        for name, nats in (("softmax", 1.5), ("linear", 1.6), ("gated_deltanet", 1.7))
        for metric, turned in (("nats_per_character", float), ("perplexity", math.exp))
        for one_row in rows_of(
            name,
            *(turned(nats + 1e-4 * seed**2) for seed in range(5)),
            metric=metric,
            settings={**TEST_OF_BEST, "context": "full", "chance": turned(3.2)},
            evaluation="perplexity",
        )
    ]
    over_seeds = figures(rows)
    shown = summary(over_seeds, verdicts_of(over_seeds, rank=NAMES, reference=None))
    assert headers(shown) == ["test PPL"]
    assert [name for name, (entry,) in shown.lines.items() if entry.is_best] == ["softmax"]
    against = summary(over_seeds, verdicts_of(over_seeds, rank=NAMES, reference="softmax"))
    assert {name: entry.verdict and entry.verdict.outcome for name, (entry,) in against.lines.items()} == {
        "softmax": None,
        "gated_deltanet": "worse",
        "linear": "worse",
    }


def test_the_summary_has_a_line_for_a_variant_that_has_not_run_and_says_how_many_seeds_are_behind_a_number():
    shown = summary(figures(rows_of("softmax", 0.5, None, 0.7)), [], ["linear", "softmax"])
    assert texts(shown) == {"linear": ["–"], "softmax": ["0.600 (2 of 3 seeds)"]}
    nothing = summary([], [])
    assert (nothing.columns, nothing.lines) == ([], {})


def test_many_variants_have_a_line_each():
    rows = [row for number in range(9) for row in rows_of(f"variant{number}", 0.5 + number / 100)]
    table = summary_table(summary(figures(rows), []))
    assert list(map(str, table.headers)) == ["variant", "symbols copied (%) ↑ length 50"]
    assert [str(line[0]) for line in table.lines] == [f"variant{number}" for number in range(9)]
    assert str(table.lines[8][1]) == "58"
    assert summary_table(summary(figures(rows[:8]), [])).headers[1:] == [f"variant{number}" for number in range(8)]


def test_what_a_mixer_did_not_get_stands_beside_its_score(capsys):
    settings = {"length": 50, "beyond_training": False}
    bare = {**settings, "not_applicable": ["conv_size", "output_gate"]}
    rows = [*rows_of("softmax", 0.5, 0.75, settings=settings), *rows_of("mine", 0.25, 0.25, settings=bare)]
    rows += rows_of("lost", None, settings=bare)
    shown = summary(figures(rows), [])
    # It is no axis: one column for all.
    assert headers(shown) == ["copy at 50"]
    assert [str(cell) for cell in summary_table(shown).lines[0]] == [
        "symbols copied (%) ↑ length 50",
        "62",
        "25 without conv_size, output_gate",
        "out of memory without conv_size, output_gate",
    ]
    page = to_markdown(summary_table(shown, with_intervals=True))
    assert "| 25 (25.0 to 25.0) without conv_size, output_gate |" in page
    print_comparison(inputs_of(rows, ["softmax", "mine"]))
    said = capsys.readouterr().out
    assert "mine: without conv_size, output_gate, which others have here." in said


def test_a_mean_accuracy_stands_with_the_range_of_its_seeds_and_how_many_solved_their_task():
    hardest, longer = {"length": 50, "beyond_training": False}, {"length": 75, "beyond_training": True}
    rows = [
        row("softmax", seed, metric, value, settings={**at, "split": "test", "chance": chance})
        for seed, score in enumerate([0.99800, 0.99951, 1.0])
        for metric, value, at, chance in (
            ("symbol_accuracy", score, hardest, 1 / 26),
            ("symbol_accuracy", score - 0.5, longer, 1 / 26),
            ("solved", int(score > 0.999), {}, 0.0),
        )
    ]
    shown = summary(figures(rows), [])
    # Solved is what the longest trained strings decide.
    assert [str(line[1]) for line in summary_table(shown, with_intervals=True).lines] == [
        "100 (99.8 to 100.0) 2 of 3 solved",
        "50 (49.8 to 50.0)",
    ]
    # On a terminal and on the first screen without the range, and of one seed alone there is none.
    assert [str(cell) for cell in score_table(shown).lines[0]] == ["softmax", "100 2 of 3 solved", "50"]
    only = summary(figures([it for it in rows if it.identity.seed == 0][:1]), [])
    assert str(score_table(only, with_intervals=True).lines[0][1]) == "100"


def test_every_cell_of_recall_is_a_column_told_apart_by_its_header():
    cells = [
        {"sequence_length": 64, "num_pairs": 4, "width": 64, "chance": 1 / 32, "chance_among_pairs": 1 / 4},
        {"sequence_length": 512, "num_pairs": 64, "width": 64, "chance": 1 / 4096, "chance_among_pairs": 1 / 64},
        {"sequence_length": 512, "num_pairs": 64, "width": 128, "chance": 1 / 4096, "chance_among_pairs": 1 / 64},
    ]
    summed = figures([row(metric="accuracy", settings=cell, evaluation="recall") for cell in reversed(cells)])
    assert [column.header for column in headline_columns(summed, "recall")] == [
        "recall at 64, 4, width 64",
        "recall at 512, 64, width 64",
        "recall at 512, 64, width 128",
    ]


def test_an_evaluation_of_ones_own_shows_its_first_metric_that_is_ok_everywhere():
    rows = [
        row("softmax", metric="first", value=None, settings={"kind": "a"}, evaluation="mine"),
        row("softmax", metric="second", value=0.5, settings={"kind": "a"}, evaluation="mine"),
        row("softmax", metric="second", value=0.6, settings={"kind": "b"}, evaluation="mine"),
        row("linear", metric="second", value=0.7, settings={"kind": "b"}, evaluation="mine"),
        row("linear", metric="third", value=0.7, settings={"kind": "b"}, evaluation="mine"),
    ]
    (column,) = headline_columns(figures(rows), "mine")
    assert (column.metric, column.settings, column.header) == ("second", {"kind": "b"}, "mine second at kind b")
    assert column.higher_is_better is None
    (alone,) = headline_columns(figures(rows[1:2]), "mine")
    assert alone.header == "mine second"
    assert headline_columns(figures(rows), "copy") == []
    # Of test data where it has some.
    chosen_by = rows_of("softmax", 0.9, metric="selection", evaluation="parity", settings={"split": "validation"})
    scored = rows_of("softmax", 0.4, metric="accuracy", evaluation="parity", settings={"split": "test"})
    for rows, metric in (([*chosen_by, *scored], "accuracy"), (chosen_by, "selection")):
        assert [column.metric for column in headline_columns(figures(rows), "parity")] == [metric]


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_an_evaluation_has_a_column_of_numbers_whatever_its_settings(evaluation):
    rows = [row("softmax", metric="odd_share", value=0.125, settings={"split": "test"}, evaluation=evaluation)]
    table = summary_table(summary(figures(rows), []))
    assert re.search(r"\b(0\.125|12)\b", to_markdown(table))


def test_scaling_shows_the_largest_size_that_all_could_run():
    def cost(variant, model, value):
        return row(variant, metric="step_milliseconds", value=value, settings={"model": model}, evaluation="scaling")

    sizes = ["tiny", "12m", "4m", "27m"]
    rows = [cost("softmax", size, None if size == "27m" else 2.0) for size in sizes]
    rows += [cost("linear", size, 1.0) for size in sizes]
    (column,) = headline_columns(figures(rows), "scaling")
    assert (column.settings, column.header) == ({"model": "12m"}, "ms a step at 12m")


def test_inference_shows_decoding_and_the_bytes_that_it_reads():
    def decoded(metric, value, **settings):
        return row("softmax", metric=metric, value=value, settings=settings, evaluation="inference")

    rows = []
    for length in (256, 1024):
        rows.append(decoded("state_bytes", 100.0 * length, cache_length=length))
        rows.append(decoded("decode_tokens_per_second", 9.0, cache_length=length, batch_size=8))
    columns = headline_columns(figures(rows), "inference")
    assert [column.header for column in columns] == ["decode token/s at 1024, 8", "bytes of state at 1024"]


def test_axes_that_are_no_numbers_or_missing_order_before_numbers():
    rows = [
        row("softmax", metric="decode_tokens_per_second", value=value, settings=settings, evaluation="inference")
        for value, settings in ((1.0, {"cache_length": "short"}), (2.0, {"cache_length": 256}), (3.0, {"kind": "x"}))
    ]
    (column,) = headline_columns(figures(rows), "inference")
    assert column.settings["cache_length"] == 256


def test_the_summary_says_which_way_is_better_as_the_primary_metric_does():
    classes = [evaluation_class(path.stem) for path in (CONF / "eval").glob("*.yaml")]
    primaries = {found: found.primary for found in classes if found is not None and found.primary is not None}
    assert len(primaries) >= 3
    for found, primary in primaries.items():
        ways = {headline.higher_is_better for headline in found.headline if headline.metric == primary.metric}
        assert ways <= {primary.higher_is_better}
    rows = rows_of("softmax", 0.5, metric="accuracy", settings={"length": 3}, evaluation="mine")
    (column,) = headline_columns(figures(rows), "mine")
    assert column.higher_is_better is True


def test_a_bench_is_summed_up_by_its_times_at_the_largest_shape():
    def timing(name, length, value, metric="forward_milliseconds"):
        settings = {"sequence_length": length, "head_width": 64}
        return row(name, metric=metric, value=value, settings=settings, evaluation="attention")

    rows = [timing(name, length, 1.0, metric) for name in ("triton", "textbook") for length in (256, 1024)
            for metric in ("max_error", "forward_milliseconds", "backward_milliseconds")]  # fmt: skip
    columns = headline_columns(figures(rows), "attention")
    assert [column.header for column in columns] == ["forward ms at 1024, 64", "backward ms at 1024, 64"]


def test_references_of_models_of_other_sizes_are_not_one_load():
    def timed(variant: str, model: str, milliseconds: float) -> ResultRow:
        settings = {"sequence_length": 256, "reference_milliseconds": [milliseconds] * 2, "reference_ratio": 1.0}
        made = {"settings": settings, "of": {"unit": "token/s"}, "evaluation": "throughput", "model": model}
        return row(variant, 0, "tokens_per_second", 1e6 / milliseconds, **made)

    def lead(*rows: ResultRow) -> str:
        return sittings_lead((it.metric, it) for it in figures(rows))

    assert lead(timed("softmax", "1m", 10.0), timed("linear", "4m", 40.0)) == ""
    assert "the load changed" in lead(timed("softmax", "1m", 10.0), timed("linear", "1m", 40.0))
