"""Every bench of conf/bench at its smoke settings, and the gate, the rows and the tables that they share."""

import json
import sys

import pytest
import yaml

from attnbench.bench.base import Bench
from attnbench.bench.page import write_page
from attnbench.config import CONF
from attnbench.registry import resolve
from attnbench.results import read_csv

BENCHES = sorted(path.stem for path in (CONF / "bench").glob("*.yaml"))


def smoke_words(name: str) -> list[str]:
    """The smoke settings of a yaml of conf/bench, as a command line has them."""
    target = yaml.safe_load((CONF / "bench" / f"{name}.yaml").read_text())["_target_"]
    return [f"bench.{option}={json.dumps(value)}" for option, value in resolve(target, Bench).smoke.items()]


def run_script(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """What `python scripts/benchmark.py` does with these words, in this process."""
    import runpy

    from attnbench.config import ROOT

    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    runpy.run_path(str(ROOT / "scripts" / "benchmark.py"), run_name="__main__")


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_measures_prints_and_publishes(name, tmp_path, monkeypatch, capsys):
    words = [f"bench={name}", "device=cpu", f"outputs_dir={tmp_path}", *smoke_words(name)]
    run_script(monkeypatch, *words)
    said = capsys.readouterr()
    assert all(len(line) <= 80 for line in said.out.splitlines() if not line.startswith("  /"))
    (folder,) = (tmp_path / "benchmark" / name).iterdir()
    rows = read_csv(folder / "results.csv")
    assert {row.identity.evaluation for row in rows} == {name}
    assert {row.identity.precision for row in rows} == {"float32"}
    measured = [row for row in rows if row.measurement.status == "ok" and row.identity.variant != "device"]
    assert measured
    assert not [row for row in rows if row.measurement.status == "failed"]
    files = {path: path.stat().st_mtime_ns for path in folder.glob("results/*.jsonl")}
    run_script(monkeypatch, *words)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("results/*.jsonl")} == files
    write_page([folder], tmp_path / "page", title="A title")
    page = (tmp_path / "page" / "README.md").read_text()
    assert page.startswith("# A title\n")
    assert f"bench={name}" in page
    assert read_csv(tmp_path / "page" / "results.csv") == rows
