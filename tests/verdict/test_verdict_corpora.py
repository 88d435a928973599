"""Verdicts over corpora: counts of outcomes, and a mixed model held against its closed form."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t
from simulate_verdicts import ACCURACY, NATS

from attnbench.report.sections.corpus_table import corpora_lines, corpora_section
from attnbench.results.tables import Table, TableCell
from attnbench.verdict.family import Pair
from attnbench.verdict.over_corpora import SINGULAR_FIT, mixed_model, over_corpora
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


def drawn(corpora: int, seeds: int, between: float, within: float, mean: float = 0.02) -> list[list[float]]:
    rng = np.random.default_rng(corpora * 1000 + seeds)
    return [list(mean + rng.normal() * between + rng.normal(size=seeds) * within) for _ in range(corpora)]


@pytest.mark.parametrize(("between", "within"), [(0.02, 0.005), (0.01, 0.01), (0.1, 1e-4)])
@pytest.mark.parametrize(("corpora", "seeds"), [(3, 5), (6, 3)])
def test_the_mixed_model_of_equally_many_seeds_is_student_s_test_of_means(corpora, seeds, between, within):
    groups = drawn(corpora, seeds, between, within)
    fitted = mixed_model(groups)
    assert not isinstance(fitted, str)
    interval, deviation = fitted
    means = [np.mean(group) for group in groups]
    half = float(t.ppf(0.975, corpora - 1) * np.std(means, ddof=1) / math.sqrt(corpora))
    assert interval.mean == pytest.approx(float(np.mean(means)), rel=1e-6)
    assert interval.low == pytest.approx(float(np.mean(means) - half), rel=1e-3, abs=1e-3 * half)
    assert interval.high == pytest.approx(float(np.mean(means) + half), rel=1e-3, abs=1e-3 * half)
    of_means = np.var(means, ddof=1) - np.mean([np.var(group, ddof=1) for group in groups]) / seeds
    assert deviation == pytest.approx(math.sqrt(of_means), rel=1e-2)


def test_corpora_with_different_numbers_of_seeds_are_fitted_too():
    fitted = mixed_model([[0.01, 0.012], [0.03, 0.031, 0.029, 0.03], [0.05, 0.052, 0.051]])
    assert not isinstance(fitted, str)
    assert fitted[0].mean == pytest.approx(0.03, abs=1e-3)


def test_what_cannot_be_fitted_says_why():
    assert mixed_model([[0.01, 0.02, 0.03]] * 3) == SINGULAR_FIT
    equal = "the differences of each corpus are equal, whatever the seed"
    assert mixed_model([[0.01, 0.01], [0.02, 0.02], [0.03, 0.03]]) == equal
    assert mixed_model([[0.0, 0.0]] * 3) == equal
    two = {"a": [0.01, 0.02], "b": [0.03, 0.02]}
    reasons = {
        "2 corpora are too few, 3 would do": verdicts(two),
        "fewer than two common seeds on c": verdicts({**two, "c": [0.02]}),
        "seeds diverged on a, b, c": verdicts({**two, "c": [0.02, 0.04]}, failed=("linear",)),
        "differences of accuracies are not normal": verdicts({**two, "c": [0.02, 0.04]}, primary=ACCURACY),
    }
    for reason, given in reasons.items():
        (found,) = over_corpora(given)
        assert (found.estimate, found.obstacle) == (None, reason)
        assert f"There is no mixed model: {reason}." in corpora_lines(given)["Over corpora"][0]


CLEAR, EQUAL, UNCLEAR = [-0.05, -0.051, -0.049], [1e-5, -1e-5, 2e-5], [-0.05, 0.06, 0.01]
KS = {"a": 1, "b": 2, "c": 3}
COUNTED = [
    (
        {"a": CLEAR, "b": CLEAR, "c": UNCLEAR, "d": CLEAR},
        "linear is better than softmax in perplexity in 3 of 4 corpora (a, b, d), undecided in 1 (c). ",
    ),
    (
        {"a": [-x for x in CLEAR], "b": [-x for x in CLEAR], "c": CLEAR, "d": EQUAL},
        "softmax is better than linear in perplexity in 2 of 4 corpora (a, b), worse in 1 (c), equivalent in 1 (d). ",
    ),
    (
        {"a": EQUAL, "b": UNCLEAR, "c": [0.1]},
        "linear and softmax in perplexity: equivalent in 1 of 3 corpora (a), undecided in 1 (b), "
        "without a verdict in 1 (c). ",
    ),
]


@pytest.mark.parametrize(("differences", "sentence"), COUNTED)
def test_counts_read_as_a_sentence(differences, sentence):
    (line,) = corpora_lines(verdicts(differences))["Over corpora"]
    assert line.startswith(sentence)


def test_the_estimate_is_of_the_pair_as_it_stands_whoever_is_better():
    # Of -5, -10 and -15 % of nats: -0.1, and 4.303 standard errors of 0.05 / sqrt(3) either way.
    (line,) = corpora_lines(verdicts({name: [k * x for x in CLEAR] for name, k in KS.items()}))["Over corpora"]
    assert line.startswith("linear is better than softmax")
    assert "By a mixed model linear’s perplexity differs from softmax’s by -10 % [-20, +2] over corpora" in line
    # Turned, 0.1 nats are 11 % of softmax's perplexity, between the 5 and the 16 % of single corpora.
    (line,) = corpora_lines(verdicts({name: [-k * x for x in CLEAR] for name, k in KS.items()}))["Over corpora"]
    assert line.startswith("softmax is better than linear")
    assert "By a mixed model linear’s perplexity differs from softmax’s by +11 % [-2, +25] over corpora" in line


def test_a_table_has_a_column_a_corpus_and_the_model_behind():
    section = corpora_section(verdicts({"a": CLEAR, "b": EQUAL, "c": [0.1]}))
    assert section is not None
    table, _ = section.blocks
    assert isinstance(table, Table)
    assert list(table.headers) == ["Pair", "Evaluation", "a", "b", "c", "Over corpora"]
    (line,) = table.lines
    texts = [cell.text if isinstance(cell, TableCell) else cell for cell in line]
    assert texts == ["linear − softmax", "perplexity", "better", "equivalent", "no verdict", "–"]
    assert isinstance(line[5], TableCell)
    assert line[5].notes == ("fewer than two common seeds on c",)


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
