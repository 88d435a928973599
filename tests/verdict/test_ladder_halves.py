"""Halves of a ladder's seeds, on made-up doublings whose answer is known by hand."""

import json

import ladder_halves
import pytest
from ladder_halves import agreement, table
from made_rows import inputs_of, rows_of

from attnbench.results.row_tables import write_csv
from attnbench.settings.errors import UserError


def doublings(variant, *values, evaluation="ladder_recall"):
    settings = {"split": "test", "levels": 6, "chance": 0.0}
    return rows_of(variant, *values, metric="doublings", evaluation=evaluation, settings=settings)


def test_splits_are_counted_by_hand():
    assert agreement([1, 2, 3, 4, 5, 6, 7, 8]) == 1
    # Of the 3 splits of 4 seeds, {4, -1} and {1, 1} alone have one sign; the sum of {-1, 1} is 0.
    assert agreement([4, -1, 1, 1]) == pytest.approx(1 / 3)
    # A seed of -10 outweighs any three others, so that no split of 8 agrees.
    assert agreement([-10, 2, 2, 2, 2, 2, 2, 2]) == 0
    # The half with -4 is positive if 5 is in it, as in 15 of the 35 splits; the other half is always positive.
    assert agreement([-4, 5, 1, 1, 1, 1, 1, 1]) == pytest.approx(15 / 35)
    with pytest.raises(UserError, match="7 seeds: only an even number"):
        agreement([1] * 7)


def test_pairs_that_the_verdicts_separate_are_counted(tmp_path, capsys):
    flat, high = (0.0, 0.1) * 4, (4.0, 4.1) * 4
    recall = [*doublings("a", *high), *doublings("b", *flat), *doublings("c", *reversed(flat))]
    copied = [row for name in "abc" for row in doublings(name, *flat, evaluation="ladder_copy")]
    inputs = inputs_of([*recall, *copied], "abc", rank=["a", "b", "c"])
    expected = table(inputs.verdicts)
    assert "| ladder_recall | 3 | 2 | for 15 pairs alone | 100.0% | met |" in expected
    assert "| ladder_copy | 3 | 0 | for 15 pairs alone | – | – |" in expected
    assert "| ladder_recall | a | c | 4.00 | 8 | 100.0% |" in expected
    write_csv([*recall, *copied], tmp_path / "results.csv")
    record = {"plan": "made", "command": "", "variants": ["a", "b", "c"], "rank": ["a", "b", "c"], "reference": None}
    (tmp_path / "comparison.json").write_text(json.dumps(record))
    ladder_halves.main([str(tmp_path)])
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_goal_is_of_fifteen_pairs():
    # Six variants a doubling apart, of which the last two are alike: 14 pairs of 15 are separated.
    means = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 1, "f": 1}
    scores = {name: [mean + step for step in (0, 0.1) * 4] for name, mean in means.items()}
    rows = [row for name, values in scores.items() for row in doublings(name, *values)]
    assert "| ladder_recall | 15 | 14 | 8 of 15: met | 100.0% | met |" in table(
        inputs_of(rows, scores, rank=[*scores]).verdicts
    )
    with pytest.raises(UserError, match="no verdicts on ladder_recall"):
        table([])
