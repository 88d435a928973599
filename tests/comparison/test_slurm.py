"""Plans on a real Slurm: every cell once and as a local run has it, whatever is killed, drained or cut off."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from probe_settings import smoke_words
from slurm_cluster import LIMITED, Cluster, wait_until, why_not
from small import TINY_RUN, comparison_settings, python_path

from attnbench.comparison.slurm import queue
from attnbench.comparison.slurm.queue import array_job
from attnbench.comparison.slurm.run import Submission
from attnbench.comparison.slurm.task import TIMED_HOST, different_host
from attnbench.results.folder import ROOT
from attnbench.results.row_files import read_results
from attnbench.settings.combinations import check_launcher
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PlanSettings

pytest.importorskip("submitit", reason="needs the extra `cluster`")

PLAN = PlanSettings(
    name="little", overrides=[], variants={}, evaluations=[], seeds=[0], probe_seeds=[0], learning_rates=[4e-3]
)
CLOCKS = ("tokens_per_second", "generator_tokens_per_second", "train_seconds", "first_step_seconds", "peak_memory_mib")
WHERE = ("environment", "commit")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    started = Cluster(tmp_path_factory.mktemp("slurm"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def conf(text, tmp_path_factory) -> Path:
    """A folder with a plan at smoke size."""
    path = tmp_path_factory.mktemp("conf") / "plan" / "little.yaml"
    path.parent.mkdir()
    words = [*TINY_RUN, f"data.path={text}", *smoke_words("copy", "perplexity", "throughput")]
    plan = {
        "overrides": [*words, "eval.copy.learning_rates=[1e-2,3e-2]", "eval.copy.num_steps=60"],
        "variants": {"softmax": ["attn=softmax"], "plain": ["attn=linear"]},
        "evaluations": ["copy", "perplexity", "throughput"],
        "seeds": [0, 1],
        "probe_seeds": [0, 1],
        "learning_rates": [4e-3],
        "num_search_seeds": 1,
        "num_workers": 1,
    }
    path.write_text(yaml.safe_dump(plan))
    return path.parents[1]


def begin(cluster: Cluster, conf: Path, outputs: Path, *words: str) -> subprocess.Popen[str]:
    """Start compare.py."""
    fixed = ["plan=little", "device=cpu", "logger=none", "report=false", f"outputs_dir={outputs}"]
    process = subprocess.Popen(
        [sys.executable, "scripts/compare.py", "--config-dir", str(conf), *fixed, *words],
        cwd=ROOT,
        env={**python_path(ROOT), "OMP_NUM_THREADS": "1", "SLURM_CONF": cluster.environment["SLURM_CONF"]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Where a test fails, it does not outlive the cluster.
    cluster.started.append(process)
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error."""
    said = process.communicate(timeout=600)[1]
    return process.returncode, said


def on_slurm(cluster: Cluster, conf: Path, outputs: Path, *words: str) -> subprocess.Popen[str]:
    return begin(cluster, conf, outputs, "launcher=slurm", "slurm.tasks=2", "slurm.minutes=20", *words)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of all results files, without what a clock, or the commit, says."""
    found = []
    for path in sorted(folder.glob("**/results/*.jsonl")):
        assert path.exists()
        for row in read_results(path):
            if row.identity.evaluation == "throughput" or row.measurement.metric in CLOCKS:
                row.measurement.value = row.measurement.low = row.measurement.high = row.measurement.num_samples = None
            found.append({**row.to_dict(), **dict.fromkeys(WHERE)})
    return found


def running(cluster: Cluster) -> list[str]:
    """Tasks that run."""
    return cluster.says("squeue", "-h", "-r", "-t", "running", "-o", "%i").split()


@pytest.fixture(scope="module")
def local(cluster, conf, tmp_path_factory) -> list[dict[str, Any]]:
    """Rows of the plan on this host."""
    outputs = tmp_path_factory.mktemp("local")
    code, said = ended(begin(cluster, conf, outputs))
    assert code == 0, said
    return rows(outputs)


@pytest.mark.slow
def test_whatever_happens_every_cell_is_there_once_and_as_a_local_run_has_it(cluster, conf, local, tmp_path):
    # The command is cut off while its tasks run.
    process = on_slurm(cluster, conf, tmp_path)
    wait_until(lambda: len(running(cluster)) == 2, "two running tasks")
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 130
    assert re.search(r"Slurm keeps running job \d+: the same command collects it", said)
    # A node is lost, and the task begins again on the other; the controller is restarted in the meantime.
    assert cluster.succeeds("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    cluster.restart_controller()
    process = on_slurm(cluster, conf, tmp_path)
    time.sleep(10)
    cluster.restart_controller()
    # It may have come back by itself, when it registered with the controller that was restarted.
    cluster.succeeds("scontrol", "update", "nodename=n2", "state=resume")
    # Drained, a node ends what it has. Slurm begins a task again two minutes after its node was lost, no sooner.
    wait_until(lambda: bool(running(cluster)), "a running task", seconds=240)
    assert cluster.succeeds("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    # A task is killed while the command waits: its cells failed, the others are run.
    wait_until(lambda: bool(running(cluster)), "a running task")
    killed = running(cluster)[0]
    assert cluster.succeeds("scancel", killed)
    code, said = ended(process)
    cluster.succeeds("scontrol", "update", "nodename=n1", "state=resume")
    assert code == 1, said
    assert f"Slurm's task {killed} ended (CANCELLED" in said
    code, said = ended(on_slurm(cluster, conf, tmp_path))
    assert code == 0, said
    assert rows(tmp_path) == local
    record = json.loads((tmp_path / "little" / "comparison.json").read_text())
    assert (record["missing"], record["failures"]) == ([], [])
    assert len(set(record["files"])) == len(record["files"])
    # Once all is there, nothing is submitted.
    code, said = ended(on_slurm(cluster, conf, tmp_path))
    assert (code, "tasks; their output" in said) == (0, False)


@pytest.mark.slow
def test_a_command_that_does_not_wait_is_given_again_until_all_is_collected(cluster, conf, local, tmp_path):
    cluster.wait_for_nodes()
    for _ in range(30):
        code, said = ended(on_slurm(cluster, conf, tmp_path, "wait=false"))
        assert code == 0, said
        if "the same command collects them" not in said:
            break
        wait_until(lambda: not cluster.says("squeue", "-h"), "the end of the job", 300)
    assert "the same command collects them" not in said
    assert rows(tmp_path) == local


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm.partition=nothere"], r"slurm\.partition=nothere: invalid partition specified: nothere; .*"),
        ([f"slurm.partition={LIMITED}"], rf"slurm\.partition={LIMITED}: .*(QOSMaxSubmitJob|violates accounting/QOS).*"),
        (["+slurm.options.nothing=1"], r"slurm\.partition=None: .*unrecognized option.*nothing.*"),
    ],
)
def test_a_job_that_slurm_refuses_is_one_line(cluster, conf, tmp_path, words, message):
    code, said = ended(on_slurm(cluster, conf, tmp_path, *words))
    errors = [line for line in said.splitlines() if "error" in line]
    assert code == 1, said
    assert len(errors) == 1, said
    assert re.fullmatch(f"error: {message}", errors[0])


@pytest.mark.slow
def test_a_disk_that_is_read_only_is_one_line(cluster, conf, tmp_path):
    """Here, and on a node that alone sees it so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        code, said = ended(on_slurm(cluster, conf, disk / "outputs"))
        assert code == 1, said
        assert re.search(
            r"^error: outputs_dir: .* \(Read-only file system\); outputs_dir=FOLDER", said, re.MULTILINE
        ), said
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_slurm_the_launcher_says_where_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    given = comparison_settings(PLAN, tmp_path, launcher="slurm")
    with pytest.raises(UserError, match=r"^launcher=slurm: there is no sbatch here"):
        array_job([], given, tmp_path, node=None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"launcher": "local", "wait": False}, "wait=false: needs launcher=slurm"),
        ({"device": "auto"}, "device=auto: with launcher=slurm name it"),
        ({"device": "cuda"}, r"slurm\.gpus=0: with device=cuda a task needs one"),
        ({"wait": False, "rerun": True}, "wait=false: with rerun=true"),
    ],
)
def test_settings_that_do_not_fit_the_launcher_are_refused(tmp_path, changed, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check_launcher(comparison_settings(PLAN, tmp_path, **{"launcher": "slurm", **changed}))


def test_what_is_timed_stays_on_the_node_that_began_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert different_host(tmp_path) is None
    assert not (tmp_path / TIMED_HOST).exists()
    assert different_host(tmp_path, keeps=True) is None
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    refused = different_host(tmp_path, keeps=True)
    assert refused is not None
    assert refused.startswith("timed runs were started on n1, and this host is n2")
    # All of it measured again, there is no other host's.
    assert different_host(tmp_path, keeps=True, anew=True) is None
    assert different_host(tmp_path) is None


def test_the_end_of_a_torn_file_of_outcomes_is_left_out(tmp_path):
    submission = Submission(path=tmp_path / "key.json", job="7", tasks=[["a", "b"], ["c"]], rerun=False)
    submission.write()
    assert Submission.read(submission.path) == submission
    lines = {"key-0.0": [("a", None, "n1"), ("b", "no", "n1")], "key-0.1": [("a", None, "n2"), ("b", None, "n2")]}
    for name, records in lines.items():
        text = "".join(
            json.dumps({"cell": cell, "seconds": 1.0, "error": error, "host": host}) + "\n"
            for cell, error, host in records
        )
        (tmp_path / f"{name}.jsonl").write_text(text + '{"cell": "b", "sec')
    assert [record["cell"] for record in submission.records()] == ["a", "b", "a", "b"]
    submission.path.write_text("{")
    with pytest.raises(UserError, match=r"key\.json: cannot be read as JSON"):
        Submission.read(submission.path)


@pytest.mark.parametrize(
    ("answer", "tasks"),
    [
        ((0, "7_0|RUNNING|None\n7_1|PENDING|Resources\n", ""), {"7_0": "running", "7_1": "pending (Resources)"}),
        ((1, "", "slurm_load_jobs error: Invalid job id specified"), {}),
        ((1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"), None),
        ((1, "", ""), None),
    ],
)
def test_a_controller_that_does_not_answer_is_no_end_of_a_job(monkeypatch, answer, tasks):
    monkeypatch.setattr(queue, "_ask", lambda *command: subprocess.CompletedProcess(command, *answer))
    assert queue.tasks_in_queue("7") == tasks
