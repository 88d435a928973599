"""The demo's probes learn, so that its table shows mixers and no mistakes."""

import json
import subprocess
import sys

import pytest

from attnbench.results.row_files import read_results


@pytest.mark.slow
def test_softmax_and_gated_deltanet_recall_and_softmax_copies(root, tmp_path):
    command = [sys.executable, "scripts/compare.py", "plan=demo", "plan.only=[recall,copy]"]
    command += ["plan.variants.flash=null", "plan.variants.linear=null", "plan.probe_seeds=[0]"]
    command += ["device=cpu", "logger=none", "report=false"]
    subprocess.run([*command, f"outputs_dir={tmp_path}"], cwd=root, check=True, capture_output=True)
    folder = tmp_path / "demo"
    rows = [
        row
        for name in json.loads((folder / "comparison.json").read_text())["files"]
        for row in read_results(folder / name)
    ]
    scores = {
        (row.identity.variant, row.measurement.metric, row.measurement.settings.get("length")): row.measurement.value
        for row in rows
        if row.measurement.metric in ("accuracy", "symbol_accuracy")
    }
    assert scores["softmax", "accuracy", None] >= 0.98
    assert scores["gated_deltanet", "accuracy", None] >= 0.98
    assert scores["softmax", "symbol_accuracy", 10] >= 0.95
