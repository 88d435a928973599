"""publish.py: what it refuses before it writes anything."""

import subprocess
import sys
from pathlib import Path

import pytest
from scripts_here import ROOT, run_here


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
    ("target", "runs", "words", "message"),
    [
        ("demo", ["demo"], [], "demo: must lie beside "),
        ("demo/page", ["demo"], [], "demo/page: must lie beside "),
        ("", ["demo"], [], "must lie beside "),
        ("run", ["decode", "run"], ["--command", "c"], "run: must lie beside "),
        ("page", ["nowhere"], [], "nowhere: no such folder"),
        ("page", ["demo/comparison.json"], [], "comparison.json: is no folder"),
        ("page", ["run"], [], "run: neither a comparison, findings nor a run of a bench; other runs need --command"),
        ("page", ["demo", "other"], [], "other: "),
        ("page", ["findings", "demo"], [], "demo: "),
        ("page", ["demo"], ["--command", "c"], "--command: "),
        ("page", ["findings"], ["--command", "c"], "--command: "),
        ("page", ["decode"], ["--command", "c"], "--command: "),
    ],
)
def test_what_cannot_be_a_page_is_refused_in_a_line_and_nothing_is_written(target, runs, words, message, outputs):
    before = sorted(outputs.rglob("*"))
    folders = [str(outputs / name) for name in runs]
    code, _, said = run_here("publish.py", str(outputs / target), *folders, "--title", "t", *words)
    assert (code, len(said.splitlines())) == (1, 1)
    assert message in said
    assert sorted(outputs.rglob("*")) == before


def test_no_script_loads_torch_before_a_signal_is_one_line():
    scripts = sorted(map(str, (ROOT / "scripts").glob("*.py")))
    assert len(scripts) > 10
    program = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program, *scripts], cwd=ROOT, check=True, timeout=120)
