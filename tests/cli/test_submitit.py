"""Sweeps whose jobs are processes of their own end as all others do: a table, what failed, an exit code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from small import python_path, run_small

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `cluster`")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my_text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return path


def sweep(root: Path, text: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder = text.parent
    # run_small's own device is left to the tests; its text is this one.
    settings = [word for word in run_small(folder) if word != "device=cpu"]
    places = [f"outputs_dir={folder / 'outputs'}"]
    (folder / "conf").mkdir(exist_ok=True)
    options = ["--config-dir", str(folder / "conf"), "-m", "hydra/launcher=submitit_local"]
    command = [sys.executable, "scripts/train.py", *options, *settings, *places, *words]
    return subprocess.run(command, cwd=root, env=python_path(folder, root), capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_what_jobs_elsewhere_leave_is_shown_here_and_a_failure_is_the_exit_code(root, text):
    done = sweep(root, text, "device=cpu", "attn=linear", "seq_len=16,100000")
    assert done.returncode == 1, done.stderr
    assert "/linear-4m-T16-seed0-" in done.stdout
    assert re.match(
        r"1 of 2 jobs failed:\n  .*seq_len=100000.*: .*give a longer text or a smaller seq_len\n$", done.stderr
    )
    outputs = text.parent / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == [".submitit", "default", "multirun.yaml"]
    (log,) = (path for path in outputs.glob(".submitit/*/*_log.err") if "feed_forward_width 24" in path.read_text())
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_job_whose_process_dies_is_named_and_the_others_are_shown(root, text):
    (text.parent / "conf" / "attn").mkdir(parents=True)
    (text.parent / "conf" / "attn" / "dies.yaml").write_text("_target_: dies.Dies\n")
    (text.parent / "dies.py").write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = sweep(root, text, "device=cpu", "attn=linear,dies")
    assert done.returncode == 1, done.stderr
    assert "/linear-4m-T16-seed0-" in done.stdout
    assert re.search(r"^error: Job \d+ .*has not produced any output \(state: \w+\); its log lies there", done.stderr)
    assert done.stderr.count("\n") == 1


def test_a_device_that_nobody_named_is_refused_before_anything_starts(root, text):
    done = sweep(root, text, "attn=linear")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: device=auto: with hydra/launcher=submitit_local name it, device=cpu")
    assert done.stderr.count("\n") == 1
    assert not (text.parent / "outputs").exists()
