"""The cost of a grid: which columns run, in whose code, from which caches, and that none is run again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import grid_cost


@pytest.fixture
def ran(monkeypatch) -> list[grid_cost.Column]:
    """Columns that were run, each in its order's number of seconds."""
    done: list[grid_cost.Column] = []

    def timed(column: grid_cost.Column) -> dict[str, Any]:
        done.append(column)
        return {"case": column.case, "column": column.name, "seconds": 10.0 * len(done)}

    monkeypatch.setattr(grid_cost, "timed", timed)
    return done


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["grid_cost.py", *words])
    grid_cost.main()


def test_a_case_has_its_columns_and_what_ran_is_not_run_again(ran, monkeypatch, tmp_path, capsys):
    words = ("copy", f"--outputs={tmp_path}", f"--before={tmp_path}")
    call(monkeypatch, *words)
    assert [column.name for column in ran] == list(grid_cost.COLUMNS)
    # A comma in a setting would be several values of it.
    assert not [word for column in ran for word in column.command if "," in word and "_dir" in word]
    assert [column.tree for column in ran] == [tmp_path, *[grid_cost.ROOT] * 3]
    assert "| copy | 10 | 20 | 30 | 40 |" in capsys.readouterr().out
    kept = tmp_path / "grid_cost.jsonl"
    kept.write_text("".join(line for line in kept.read_text().splitlines(keepends=True) if '"new"' not in line))
    call(monkeypatch, *words)
    assert [column.name for column in ran[4:]] == ["new"]
    assert json.loads(kept.read_text().splitlines()[-1])["seconds"] == 50
    call(monkeypatch, "recall_large", f"--outputs={tmp_path}", "--columns", "five workers", "one by one")
    assert [column.name for column in ran[5:]] == ["five workers", "one by one"]
    assert "| recall_large |  | 70 | 60 |  |" in capsys.readouterr().out


def test_what_has_no_path_says_so(ran, monkeypatch, tmp_path, capsys):
    call(monkeypatch, "copy", "zoology", f"--outputs={tmp_path}")
    printed = capsys.readouterr().out
    assert "copy, before: not run without --before" in printed
    assert "zoology: not run without --zoology" in printed
    assert len(ran) == 3


def test_a_case_that_there_is_not(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "recal", f"--outputs={tmp_path}")
    assert "no case recal; there are small, copy" in capsys.readouterr().err


def test_twenty_runs_of_zoology_s_loop(ran, monkeypatch, tmp_path, capsys):
    call(monkeypatch, "zoology", f"--outputs={tmp_path}", f"--zoology={tmp_path}")
    assert "zoology, sequences read: 20.0 s a run, 400 for twenty" in capsys.readouterr().out
    # The same folder of sequences, so that the second run reads the first one's.
    assert ran[0].command == ran[1].command


def test_a_column_finds_what_it_is_said_to_find(monkeypatch, tmp_path):
    """Caches of the column before it, also of another sitting; of one that was cut off nothing is left."""
    found = []

    def run(command: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess:
        caches, outputs = Path(env["TRITON_CACHE_DIR"]), tmp_path / "work" / "published" / "outputs"
        found.append((caches.exists(), outputs.exists()))
        for folder in (caches, outputs):
            folder.mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, int(len(found) == 2), "", "cut off")

    monkeypatch.setattr(subprocess, "run", run)
    words = ("published", f"--outputs={tmp_path}")
    with pytest.raises(SystemExit, match="published, filled caches: exit code 1"):
        call(monkeypatch, *words)
    call(monkeypatch, *words)
    assert found == [(False, False), (True, False), (True, False)]


def test_the_plan_of_a_case(tmp_path):
    def plan(case: str, **options: Any) -> dict[str, Any]:
        path = tmp_path / "plan.yaml"
        grid_cost.write_plan(case, path, **{"is_before": False, "steps": None} | options)
        return yaml.safe_load(path.read_text())

    rates = ("1e-3", "3e-3", "1e-2", "3e-2")
    assert list(plan("small")["variants"]) == [f"softmax_{rate}" for rate in rates]
    assert list(plan("recall_large")["variants"]) == [f"linear_{rate}" for rate in rates]
    recall = plan("recall_gated_deltanet", steps=7)
    assert all(words[0] == "attn=gated_deltanet" for words in recall["variants"].values())
    chosen = [word for word in recall["overrides"] if "cells" in word or "num_steps" in word]
    assert chosen == ["eval.recall.cells=[[256,16]]", "eval.recall.num_steps=7"]
    before, after = plan("copy", is_before=True), plan("copy")
    assert "recipe" not in before
    assert before["overrides"] == ["recipe=equipped", *after["overrides"]]
