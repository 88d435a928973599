"""Two experiments against each other: each variant with itself, by the verdicts that a comparison has."""

import dataclasses
import json
import os
import re
import runpy
import sys
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from report_rows import SKILL, write_experiment

from attnbench.report.inputs import read_inputs
from attnbench.report.versus import write_versus
from attnbench.results.row_tables import write_csv
from attnbench.results.rows import EVALUATION_OPTIONS, ResultRow
from attnbench.settings.errors import UserError

pytestmark = pytest.mark.usefixtures("without_charts")

NUM_SEEDS = 8


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    """Eight seeds of language models, without a comparison's record."""
    folder = tmp_path_factory.mktemp("outputs") / "before"
    return write_experiment(folder, seeds=NUM_SEEDS, record=False, evaluations=["perplexity"])


def changed(before: Path, target: Path, change) -> Path:
    """Write a folder of the rows as `change` returns them, and of those that it keeps."""
    write_csv([new for row in rows_of(before) if (new := change(row)) is not None], target / "results.csv")
    return target


@cache
def rows_of(before: Path) -> list[ResultRow]:
    return read_inputs(before).rows


def with_nats(row, nats):
    if row.measurement.metric != "nats_per_character":
        return row
    value = row.measurement.value + nats
    return dataclasses.replace(row, measurement=dataclasses.replace(row.measurement, value=value))


def with_identity(row, **columns):
    return dataclasses.replace(row, identity=dataclasses.replace(row.identity, **columns))


def lowered_linear(row):
    # Differences that are all alike have no spread.
    nats = -0.05 - 1e-3 * row.identity.seed if row.identity.variant == "linear" else 0.0
    return with_identity(with_nats(row, nats), commit="beef00000000")


def test_a_change_that_helps_one_variant_is_found_in_it_alone(before, tmp_path, capsys):
    page = write_versus(str(before), str(changed(before, tmp_path / "after", lowered_linear)))
    assert page == tmp_path / "after" / "report-against-before" / "index.html"
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    verdicts = {line[0]: line[-1] for line in lines if line[0] in SKILL}
    assert verdicts["linear"] == "better"
    assert verdicts["softmax"] == verdicts["gated_deltanet"] == "equivalent"
    text = page.read_text()
    assert re.search(r"linear \(after\) has 5\.\d+ % \[[^]]+\] lower perplexity than linear \(before\)", text)
    assert "lower perplexity than softmax" not in text
    assert "commit 00c0ffee0000 → beef00000000" in text


def test_order_turns_the_verdict(before, tmp_path, capsys):
    after = changed(before, tmp_path / "after", lowered_linear)
    write_versus(str(after), str(before), target=tmp_path / "page")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("linear"))
    assert line.split()[-1] == "worse"


def test_rows_of_one_folder_are_compared_by_commit_and_by_day(before, tmp_path, capsys):
    both = tmp_path / "both"
    after = changed(before, tmp_path / "after", lowered_linear)
    write_csv([*read_inputs(before).rows, *read_inputs(after).rows], both / "results.csv")
    write_versus(f"{both}@5357fac", f"{both}@beef", target=tmp_path / "page")
    assert "softmax" in capsys.readouterr().out
    assert "softmax (beef)" in (tmp_path / "page" / "index.html").read_text()
    days, today = tmp_path / "days", datetime.now().date().isoformat()
    write_experiment(days, seeds=1, record=False, evaluations=["perplexity"])
    for path in days.glob("*/results/*.jsonl"):
        # The date of a copy decides nothing.
        os.utime(path, (10**9, 10**9))
    for path in days.glob("0-*/results/*.jsonl"):
        path.write_text(re.sub('"started": "[^"]+"', '"started": "1970-01-01T12:00:00+00:00"', path.read_text()))
    with pytest.raises(UserError, match=rf"@{today} have no variant in common: softmax, and linear"):
        write_versus(f"{days}@1970-01-01", f"{days}@{today}")
    with pytest.raises(UserError, match="has no such rows, only rows of 1970-01-01 and"):
        write_versus(f"{days}@1980-01-01", str(after))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: with_identity(row, corpus="other@1"), "rows of different corpora cannot be compared"),
        (lambda row: with_identity(row, variant=f"my_{row.identity.variant}"), "have no variant in common"),
        (
            lambda row: with_identity(row, seed=row.identity.seed + 100),
            r"no common seed in perplexity \(100, .*107 and 0, .*7\), and a test needs two",
        ),
        (
            lambda row: row if row.measurement.metric == "bits_per_character" else None,
            "cannot be compared",
        ),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(before, tmp_path, change, message):
    after = changed(before, tmp_path / "after", change)
    with pytest.raises(UserError, match=message) as caught:
        write_versus(str(before), str(after))
    assert "\n" not in str(caught.value)
    assert not (after / "report-against-before").exists()


def test_scores_of_other_settings_are_not_compared(before, tmp_path):
    def read_in_part(number):
        def change(row):
            settings = {**row.measurement.settings, EVALUATION_OPTIONS: {"characters": number}}
            return dataclasses.replace(row, measurement=dataclasses.replace(row.measurement, settings=settings))

        return str(changed(before, tmp_path / f"of_{number}", change))

    with pytest.raises(UserError, match="perplexity has no setting in common"):
        write_versus(read_in_part(100), read_in_part(200))


def test_a_side_is_a_folder_a_commit_or_a_day(before, tmp_path):
    for first, second, message in (
        (before, before, "are the same folder; name another, or a commit of each"),
        (before, f"{before}@5357fac", "are the same folder"),
        (before, tmp_path / "gone", "gone: is not a folder"),
        (before, f"{before}@yesterday", "yesterday must be a commit, or a date like"),
        (
            f"{before}@abcdef",
            before / "0-perplexity-seed0",
            "has no such rows, only rows of 00c0ffee0000",
        ),
    ):
        with pytest.raises(UserError, match=message):
            write_versus(str(first), str(second))


def test_the_script_compares_two_folders(before, tmp_path, root, monkeypatch, capsys):
    after = changed(before, tmp_path / "after", lowered_linear)
    monkeypatch.setattr(sys, "argv", ["report.py", str(before), str(after), "--output", str(tmp_path / "page")])
    runpy.run_path(str(root / "scripts" / "report.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "page" / "index.html")
    names = json.loads(re.search(r'id="charts">(.*?)</script>', (tmp_path / "page" / "index.html").read_text())[1])
    assert names["variants"][:2] == ["softmax (before)", "softmax (after)"]
