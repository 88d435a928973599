"""The first screen: its facts, its table, its charts; and the examples of tasks."""

import dataclasses

import pytest
from made_rows import inputs_of, row, rows_of
from report_rows import write_experiment

from attnbench.report.inputs import read_inputs
from attnbench.report.page import write_report
from attnbench.report.sections.examples import example_lines, examples
from attnbench.report.sections.front import MANY_SCORES, facts, front_pictures, narrowed
from attnbench.report.sections.scores import score_table, signs_note
from attnbench.report.template import RUNNING
from attnbench.results.tables import TableCell, to_latex, to_markdown
from attnbench.verdict.summary import evaluation_class, summary

PLACE = {"length": 50, "beyond_training": False, "split": "test"}


def test_the_headline_says_what_was_compared(inputs):
    protocol = dataclasses.replace(inputs.protocol, trained="2,000 steps of 32 × 256 characters", seconds=5331.0)
    told = facts(dataclasses.replace(inputs, protocol=protocol))
    assert told[0] == "4 variants"
    assert "3.8 M parameters (language model)" in told
    assert "WikiText-2" in told
    assert "2,000 steps of 32 × 256 characters" in told
    assert "up to 3 seeds" in told
    assert told[-1] == "89 minutes"


def test_the_table_has_arrows_signs_and_the_digits_that_matter():
    values = {"softmax": [0.9912, 0.9951, 0.99], "linear": [0.4, 0.41, 0.42]}
    rows = [it for name, scores in values.items() for it in rows_of(name, *scores * 3, settings=PLACE)]
    inputs = inputs_of(rows, list(values), rank=list(values), reference="softmax")
    content = summary(inputs.figures, inputs.verdicts)
    table = score_table(content)
    assert str(table.headers[1]) == "symbols copied (%) ↑ length 50"
    (name, best), (_, other) = table.lines
    assert isinstance(best, TableCell)
    assert isinstance(other, TableCell)
    assert (name, best.text, best.mark, best.sign) == ("softmax", "99", "best", "")
    assert (other.text, other.mark, other.sign) == ("41", "", "▼")
    assert signs_note(content, "softmax").startswith("Shaded: the best mean of a column. Signs are against softmax: ▼")
    assert "| softmax | **99** |" in to_markdown(table)
    latex = to_latex(table)
    assert r"variant & symbols copied (\%) $\uparrow$ length 50 \\" in latex
    assert r"softmax & \textbf{99} \\" in latex
    assert r"linear & 41 $\blacktriangledown$ \\" in latex
    # A score that rounds to the best one, but is worse by a test, has digits that show it.
    close = {"softmax": [0.9912, 0.9913, 0.9911], "linear": [0.9871, 0.9872, 0.9873], "gla": [0.4, 0.41, 0.42]}
    rows = [it for name, scores in close.items() for it in rows_of(name, *scores * 4, settings=PLACE)]
    inputs = inputs_of(rows, list(close), rank=list(close), reference="softmax")
    table = score_table(summary(inputs.figures, inputs.verdicts))
    shown = [(cell.text, cell.mark, cell.sign) for _, cell in table.lines if isinstance(cell, TableCell)]
    assert shown == [("99.1", "best", ""), ("98.7", "", "▼"), ("41.0", "", "▼")]
    # Of equal means none is the best.
    alike = [it for name in values for it in rows_of(name, 0.5, 0.5, settings=PLACE)]
    assert [line[1].mark for line in score_table(summary(inputs_of(alike, [*values]).figures, [])).lines] == ["", ""]


def test_a_number_without_a_margin_has_three_digits():
    rows = [
        row(name, metric="tokens_per_second", value=value, settings={"sequence_length": 256}, evaluation="throughput")
        for name, value in (("softmax", 21_345.6), ("linear", 28_990.1))
    ]
    assert [line[1].text for line in score_table(summary(inputs_of(rows, ["softmax"]).figures, [])).lines] == [
        "21,300",
        "29,000",
    ]


def test_many_columns_leave_the_hardest_of_each_metric():
    rows = [
        row("softmax", metric="accuracy", value=0.5, settings={"sequence_length": 64 * n, "num_pairs": n, "width": 64},
            evaluation="recall")
        for n in range(1, MANY_SCORES + 2)
    ]  # fmt: skip
    content = summary(inputs_of(rows, ["softmax"]).figures, [])
    assert len(content.columns) == MANY_SCORES + 1
    (column,) = narrowed(content).columns
    assert column.settings["num_pairs"] == MANY_SCORES + 1


def test_the_first_screen_draws_seeds_where_nothing_is_tested_and_names_every_point(inputs):
    untested = dataclasses.replace(inputs, protocol=dataclasses.replace(inputs.protocol, rank=[]))
    scores, costs = front_pictures(untested)
    assert scores.name == "seeds-perplexity"
    dots = scores.spec["datasets"]["dots"]
    assert len(dots) == 12
    assert costs.name == "perplexity-step_milliseconds"
    names = {it["name"] for it in costs.spec["datasets"]["names"]}
    assert names == {it["variant"] for it in costs.spec["datasets"]["points"]}


def test_few_seeds_are_dots_without_an_interval():
    figure, *_ = inputs_of(rows_of("softmax", 1.0, 0.9, 1.0, settings=PLACE), ["softmax"]).figures
    assert figure.has_range
    assert figure.spread == "(0.900 to 1.000)"
    nats = rows_of("softmax", 1.5, 1.52, 1.51, metric="nats_per_character", settings=PLACE, evaluation="perplexity")
    (figure,) = inputs_of(nats, ["softmax"]).figures
    assert figure.spread == "(1.5 to 1.52)"
    assert figure.text == "1.510"
    (flops,) = inputs_of(rows_of("softmax", 8.0, 8.0, metric="forward_flops_per_token"), ["softmax"]).figures
    assert flops.spread == ""


@pytest.mark.parametrize(
    "name", ["recall", "copy", "state_tracking", "needle", "mad", "perplexity", "ladder_recall", "ladder_copy",
             "ladder_state", "ladder_range"]
)  # fmt: skip
def test_a_task_has_an_example_of_input_and_target(name):
    found = examples(example_lines(evaluation_class(name)))
    assert found
    for example in found:
        assert len(example.positions) > 2
        assert any(wanted != "." for _, wanted in example.positions)


def test_an_example_is_read_from_lines_with_labels_and_without():
    (pair,) = examples(["input   a b <sep> a b", "target  .  . a   b ."])
    assert pair.positions == [("a", "."), ("b", "."), ("<sep>", "a"), ("a", "b"), ("b", ".")]
    first, second = examples(["parity  input  0 1  target  0 1", "s3  input  x1  target  x1"])
    assert (first.label, second.label) == ("parity", "s3")
    assert examples(["nothing"]) == example_lines(int) == []


@pytest.mark.usefixtures("without_charts")
def test_a_page_of_a_running_comparison_loads_itself_again_and_needs_no_figures(tmp_path):
    folder = write_experiment(tmp_path / "demo", seeds=2, evaluations=["recall"])
    page = write_report(folder, inputs=read_inputs(folder), is_running=True)
    text = page.read_text()
    assert RUNNING in text[:200]
    assert "The comparison is running." in text
    assert not (page.parent / "results.csv").exists()
    assert list((page.parent / "figures").iterdir()) == []
    assert RUNNING not in write_report(folder).read_text()[:200]
