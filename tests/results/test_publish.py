"""publish.py: what it refuses before it writes anything."""

from pathlib import Path

import pytest
from scripts_here import run_here


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Folders that are a comparison, findings, a run of a bench and a run by the files that tell them apart."""
    for name, file in (
        ("demo", "comparison.json"),
        ("other", "comparison.json"),
        ("findings", "findings.json"),
        ("decode", "config.yaml"),
        ("run", "config.yaml"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("bench: {name: decode}\n" if name == "decode" else "{}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("target", "runs", "message"),
    [
        ("demo", ["demo"], "demo: must lie beside "),
        ("demo/page", ["demo"], "demo/page: must lie beside "),
        ("", ["demo"], "must lie beside "),
        ("run", ["decode", "run"], "run: must lie beside "),
        ("page", ["nowhere"], "nowhere: no such folder"),
        ("page", ["demo/comparison.json"], "comparison.json: is no folder"),
        ("page", ["run"], "run: neither a comparison, findings nor a run of a bench"),
        ("page", ["demo", "other"], "demo is a comparison, which has a page alone"),
        ("page", ["findings", "demo"], "findings is findings, which has a page alone"),
    ],
)
def test_what_cannot_be_a_page_is_refused_in_a_line_and_nothing_is_written(target, runs, message, outputs):
    before = sorted(outputs.rglob("*"))
    folders = [str(outputs / name) for name in runs]
    code, _, said = run_here("publish.py", str(outputs / target), *folders, "--title", "t")
    assert (code, len(said.splitlines())) == (1, 1)
    assert message in said
    assert sorted(outputs.rglob("*")) == before
