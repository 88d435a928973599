"""Verdicts over corpora: counts of outcomes, and their table."""

from typing import Any

import pytest
from simulate_verdicts import NATS

from attnbench.report.sections.corpus_table import corpora_lines, corpora_section
from attnbench.results.tables import Table, TableCell
from attnbench.verdict.family import Pair
from attnbench.verdict.over_corpora import over_corpora
from attnbench.verdict.ranking import Verdict, judge


def verdicts(differences: dict[str, list[float]], primary=NATS, **others: Any) -> list[Verdict]:
    given: dict[str, Any] = {"primary": primary, "settings": {}, "first": "linear", "second": "softmax", **others}
    return judge(
        [
            Pair(
                **given,
                evaluation=f"perplexity on {corpus}",
                differences=tuple(values),
                seeds=tuple(range(len(values))),
            )
            for corpus, values in differences.items()
        ]
    )


CLEAR, EQUAL, UNCLEAR = [-0.05, -0.051, -0.049], [1e-5, -1e-5, 2e-5], [-0.05, 0.06, 0.01]
COUNTED = [
    (
        {"a": CLEAR, "b": CLEAR, "c": UNCLEAR, "d": CLEAR},
        "linear is better than softmax in perplexity in 3 of 4 corpora (a, b, d), undecided in 1 (c).",
    ),
    (
        {"a": [-x for x in CLEAR], "b": [-x for x in CLEAR], "c": CLEAR, "d": EQUAL},
        "softmax is better than linear in perplexity in 2 of 4 corpora (a, b), worse in 1 (c), equivalent in 1 (d).",
    ),
    (
        {"a": EQUAL, "b": UNCLEAR, "c": [0.1]},
        "linear and softmax in perplexity: equivalent in 1 of 3 corpora (a), undecided in 1 (b), "
        "without a verdict in 1 (c).",
    ),
]


@pytest.mark.parametrize(("differences", "sentence"), COUNTED)
def test_counts_read_as_a_sentence(differences, sentence):
    (line,) = corpora_lines(verdicts(differences))["Over corpora"]
    assert line == sentence


def test_a_table_has_a_column_a_corpus():
    section = corpora_section(verdicts({"a": CLEAR, "b": EQUAL, "c": [0.1]}))
    assert section is not None
    [table] = section.blocks
    assert isinstance(table, Table)
    assert list(table.headers) == ["Pair", "Evaluation", "a", "b", "c"]
    (line,) = table.lines
    texts = [cell.text if isinstance(cell, TableCell) else cell for cell in line]
    assert texts == ["linear − softmax", "perplexity", "better", "equivalent", "no verdict"]


def test_a_plan_of_one_corpus_has_neither():
    pair: dict[str, Any] = {
        "primary": NATS,
        "settings": {},
        "first": "a",
        "second": "b",
        "differences": (0.1, 0.2),
        "seeds": (0, 1),
    }
    of_one = judge([Pair(evaluation="perplexity", **pair)])
    assert over_corpora(of_one) == []
    assert corpora_lines(of_one) == {}
    assert corpora_section(of_one) is None
