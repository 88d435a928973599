"""Rows and files that wandb is given of a run, online and offline, and that nothing it does ends one."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from report_rows import SKILL, write_experiment
from wandb_server import KEY, Server

from attnbench.report.inputs import about, read_inputs
from attnbench.report.sections.answer import sentences
from attnbench.report.workspace import ANSWER, ROWS, SCORES, TABLES, VERDICTS, chart_key, score_key
from attnbench.results.rows import COLUMNS
from attnbench.settings.errors import UserError
from attnbench.training.wandb import _quiet_wandb, legal_run_id


def test_a_run_id_is_legal_and_names_the_folder_of_its_run(tmp_path):
    assert re.fullmatch("demo-softmax-tiny-T256-[0-9a-f]{12}", legal_run_id("demo/softmax tiny:T256", tmp_path))
    assert re.fullmatch("run-[0-9a-f]{12}", legal_run_id("///", tmp_path))
    outputs = (tmp_path / "before", tmp_path / "after")
    experiments = ("größe", "grüße", "x" * 100 + "-1", "x" * 100 + "-2")
    folders = [folder / experiment / "softmax-seed0-1a2b3c4d" for folder in outputs for experiment in experiments]
    ids = {legal_run_id(f"{folder.parent.name}-{folder.name}", folder) for folder in folders}
    assert len(ids) == len(folders)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in ids)


MIRROR = """
import sys, time
from pathlib import Path
from attnbench.training import wandb as mirrors
from attnbench.settings.errors import UserError
from attnbench.settings.schema import LoggerSettings

def mirror(mode, resume=False):
    settings = LoggerSettings(mode=mode, tags=["study", "tiny"])
    return mirrors.WandbMirror(settings, root=Path("."), run_id="demo/softmax", folder=Path("a"), name="softmax",
        group="demo", job_type="train", tags=["tiny"], config={"model": {"dim": 128}}, resume=resume)

def row(step, split="train"):
    return {"step": step, "tokens": step * 256, "split": split, "loss": 1 / step}
"""


def in_a_process(script, folder, quiet=True, **environment):
    """Runs `script` after MIRROR in `folder`, with nobody logged in: wandb reads its settings once a process.

    wandb itself prints nothing, where it is `quiet`: what there is to say is the mirror's notice.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and "proxy" not in k.lower()}
    source = str(Path(__file__).parents[2])
    environment = {
        **inherited,
        "HOME": str(folder),
        "NETRC": str(folder / "netrc"),
        "PYTHONPATH": source,
        **environment,
    }
    command = [sys.executable, "-c", MIRROR + script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (quiet and done.stderr), done.stderr
    return done.stdout


def inspected(folder):
    wandb = Path(sys.executable).parent / "wandb"
    command = [wandb, "leet", "inspect", "--json", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "No such command" in done.stderr:
        pytest.skip("this wandb has no `wandb leet inspect`")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_an_offline_run_is_whole_after_a_resume_and_nothing_is_there_twice(tmp_path):
    script = """
first = mirror("offline")
for step in (10, 20, 30):
    first.write(row(step))
first.close(exit_code=1)
second = mirror("offline", resume=True)
second.replay([row(10), row(20)])
second.write(row(30))
second.write(row(30, "validation"))
second.close()
second.close()
print(second.mode, second.notice, sep="\\n")
"""
    mode, notice = in_a_process(script, tmp_path, WANDB_API_KEY=KEY).splitlines()
    assert mode == "offline"
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert notice.endswith(f"upload with `wandb sync`: wandb/{runs[0].name}")
    records = inspected(runs[0])
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["tokens"] for item in history] == [2560, 5120, 7680]
    assert history[2]["train/loss"] == history[2]["validation/loss"] == 1 / 30
    run = next(record["run"] for record in records if record["type"] == "run")
    assert run["config"]["update"]["model"] == {"dim": 128}
    assert (run["run_group"], run["job_type"]) == ("demo", "train")
    assert run["run_id"] == legal_run_id("demo/softmax", tmp_path / "a")
    assert (run["display_name"], run["tags"]) == ("softmax", ["tiny", "study"])
    assert any(record.get("metric", {}).get("step_metric") == "tokens" for record in records)
    assert [record["exit"] for record in records if record["type"] == "exit"] == [{"exit_code": 0}]
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert not any(KEY.encode() in file.read_bytes() for file in files)


@pytest.mark.slow
def test_a_key_and_a_network_that_hangs_is_offline_at_once(tmp_path):
    script = """
import socket, wandb
socket.getaddrinfo = lambda *arguments, **options: time.sleep(600)
start = time.perf_counter()
print(*mirrors.choose_mode(LoggerSettings(mode="auto")))
print(time.perf_counter() - start)
try:
    mirror("online")
except UserError as error:
    print(error)
"""
    decision, seconds, refusal = in_a_process(script, tmp_path, WANDB_API_KEY=KEY).splitlines()
    assert decision.startswith("offline no answer from https://api.")
    assert float(seconds) < 3
    assert refusal.startswith("logger.mode=online: no answer from")
    assert not (tmp_path / "wandb").exists()


def test_wandb_is_imported_only_where_it_is_used_and_refusals_are_one_line(tmp_path):
    script = """
import os
import re

def decided(mode, **environment):
    os.environ.update(environment)
    try:
        opened = mirror(mode)
        opened.write(row(1))
        opened.close()
        print(opened.mode, opened.reason, "wandb" in sys.modules)
    except UserError as error:
        print(error)
    for name in environment:
        del os.environ[name]

decided("none")
decided("none", WANDB_MODE="online")
decided("online", WANDB_MODE="disabled")
decided("auto", WANDB_DISABLED="true")
decided("auto", WANDB_MODE="onlin")
print("wandb" in sys.modules, Path("wandb").exists())
print(*mirrors.choose_mode(LoggerSettings(mode="auto")))
decided("online")
decided("auto", WANDB_MODE="online")
"""
    *unused, asked, online, by_environment = in_a_process(script, tmp_path).splitlines()
    assert unused == [
        "none logger.mode=none False",
        "none logger.mode=none False",
        "none WANDB_MODE=disabled False",
        "none WANDB_DISABLED False",
        "WANDB_MODE=onlin: must be one of online, offline, disabled",
        "False False",
    ]
    assert asked == "offline not logged in"
    assert online.startswith("logger.mode=online: not logged in; `wandb login`")
    assert by_environment.startswith("WANDB_MODE=online: not logged in; `wandb login`")


@pytest.mark.slow
def test_a_setting_of_wandb_that_is_wrong_is_one_line(tmp_path):
    script = """
try:
    mirror("auto")
except UserError as error:
    print(error)
"""
    output = in_a_process(script, tmp_path, WANDB_BASE_URL="http://x:99999")
    assert output.startswith("wandb's setting base_url, from the environment or its file: ")
    assert output.count("\n") == 1


@pytest.mark.slow
def test_wandb_offline_said_once_holds_for_auto(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    script = 'print(*mirrors.choose_mode(LoggerSettings(mode="auto")))'
    # wandb names the file of settings that it found.
    decision = in_a_process(script, tmp_path, quiet=False, WANDB_API_KEY=KEY)
    assert decision == "offline `wandb offline` was run here\n"


@pytest.mark.slow
def test_a_comparison_is_one_run_with_its_tables_its_charts_its_report_and_its_summary(tmp_path):
    write_experiment(tmp_path / "experiment", seeds=6)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("a page")
    script = """
from attnbench.report.workspace import show_comparison
show_comparison(Path("experiment"), LoggerSettings(mode="none"), root=Path("."))
print("wandb" in sys.modules, Path("wandb").exists())
# A second time it is the same run, and not a second one.
settings = LoggerSettings(mode="offline", name="mine")
for _ in range(2):
    show_comparison(Path("experiment"), settings, root=Path("."), report=Path("report"))
"""
    assert in_a_process(script, tmp_path) == "False False\n"
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    records = inspected(folder)
    run = next(record["run"] for record in records if record["type"] == "run")
    assert (run["display_name"], run["run_group"], run["job_type"]) == ("mine", "demo", "comparison")
    inputs = read_inputs(tmp_path / "experiment")
    rows = inputs.rows
    media = folder / "files" / "media" / "table"
    files = {str(path.relative_to(media)).rpartition("_0_")[0]: path for path in media.rglob("*.table.json")}
    tables = {name.removesuffix("_table"): json.loads(path.read_text()) for name, path in files.items()}
    place = {name: index for index, name in enumerate(COLUMNS)}
    data = tables[ROWS]["data"]
    assert tuple(tables[ROWS]["columns"]) == COLUMNS
    assert [line[place["value"]] for line in data] == [row.measurement.value for row in rows]
    assert json.loads(data[0][place["settings"]]) == rows[0].measurement.settings
    found = {
        chart_key(evaluation, metric, axis)
        for evaluation in ("copy", "recall", "perplexity", "throughput", "memory", "profile")
        for metric, axis in about(evaluation, inputs.protocol).plots or ()
        for row in rows
        if row.identity.evaluation == evaluation
        and row.measurement.metric == metric
        and axis in row.measurement.settings
    }
    assert len(found) > 8
    scored = {score_key(name) for name in {row.identity.evaluation for row in rows} if score_key(name) in tables}
    assert scored > {score_key("copy"), score_key("recall"), score_key("perplexity")}
    assert found == set(tables) - {*TABLES} - scored
    assert [line[0] for line in tables[SCORES]["data"]] == [*SKILL]
    copied = tables[SCORES]["columns"].index("copy/copy at 50")
    assert all(0 < line[copied] <= 1 for line in tables[SCORES]["data"])
    judged = [dict(zip(tables[VERDICTS]["columns"], line, strict=True)) for line in tables[VERDICTS]["data"]]
    assert [it["first"] for it in judged] == [verdict.pair.first for verdict in inputs.verdicts]
    words = {it["verdict"] for it in judged}
    assert {"better", "undecided"} < words <= {"better", "worse", "equivalent", "undecided", "none"}
    assert [line for (line,) in tables[ANSWER]["data"]] == sentences(inputs)
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    (report,) = (it for it in artifacts if it["type"] == "report")
    assert [it["path"] for it in report["manifest"]["contents"]] == ["index.html"]
    assert {line for _, line, _ in tables["copy/symbol_accuracy_by_length"]["data"]} == set(SKILL)
    updates = [item for record in records if record["type"] == "summary" for item in record["summary"]["update"]]
    assert any("copy/copy at 50/softmax" in str(item) for item in updates), updates
    outside = [path for path in tmp_path.iterdir() if path.name not in ("experiment", "report", "wandb", "netrc")]
    assert not [path for folder in outside for path in folder.rglob("*.table.json")]


@pytest.fixture
def server(monkeypatch):
    """A server and its address; a request for /stop ends it."""

    def get(self):
        Server.reply(self, {})
        if self.path == "/stop":
            # Not in this thread, which shutdown waits for.
            threading.Thread(target=stop).start()

    def stop():
        running.shutdown()
        running.server_close()

    monkeypatch.setattr(Server, "do_GET", get)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    stop()


@pytest.mark.slow
def test_a_server_gets_a_comparison_s_tables_and_report(tmp_path, server, monkeypatch):
    for name, empty in (("uploaded", []), ("asked", []), ("files", {})):
        monkeypatch.setattr(Server, name, empty)
    write_experiment(tmp_path / "experiment", evaluations=("copy", "perplexity"))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("a page")
    script = """
from attnbench.report.workspace import show_comparison
show_comparison(Path("experiment"), LoggerSettings(mode="online"), root=Path("."), report=Path("report"))
"""
    in_a_process(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server)
    assert Server.files["index.html"] == b"a page"
    kinds = [it["input"]["artifactTypeName"] for it in Server.asked if "artifactTypeName" in it.get("input", {})]
    assert kinds.count("report") == 1
    assert json.loads(Server.files[f"{SCORES}.table.json"])["columns"][0] == "variant"
    assert {f"{name}.table.json" for name in TABLES} < Server.files.keys()
    last = json.loads(next(body for body in reversed(Server.uploaded) if b"copy at 50" in body))["files"]
    (summary,) = map(json.loads, last["wandb-summary.json"]["content"])
    assert {*TABLES, f"{score_key('copy')}_table"} <= summary.keys()


@pytest.mark.slow
def test_a_network_lost_in_the_middle_neither_stops_nor_holds_up_a_run(tmp_path, server):
    script = f"""
import urllib.request
mirrors.FINISH_SECONDS = 1.5
run = mirror("auto")
print(run.notice)
run.write(row(1))
urllib.request.urlopen("{server}/stop").close()
start = time.perf_counter()
for step in range(2, 200):
    run.write(row(step))
print(time.perf_counter() - start)
run.close()
print(time.perf_counter() - start)
"""
    notice, logged, closed = in_a_process(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server).splitlines()
    assert notice == f"wandb: online at {server}/me/attnbench/runs/demo-softmax"
    # Less than one attempt at an upload would take to fail.
    assert float(logged) < 5
    assert float(closed) < 10
    records = inspected(next((tmp_path / "wandb").glob("run-*")))
    assert [r["history"]["item"]["step"] for r in records if r["type"] == "history"] == list(range(1, 200))


@pytest.mark.slow
def test_a_server_gets_no_row_twice_on_a_resume(tmp_path, server, monkeypatch):
    monkeypatch.setattr(Server, "uploaded", [])
    script = """
run = mirror("online", resume=True)
run.replay([row(10), row(20)])
run.write(row(30))
run.close()
"""
    in_a_process(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server)
    files = [json.loads(body).get("files", {}) for body in Server.uploaded]
    lines = [line for part in files for line in part.get("wandb-history.jsonl", {}).get("content", [])]
    assert [json.loads(line)["step"] for line in lines] == [30]


@pytest.mark.slow
def test_a_server_that_refuses_the_key_leaves_the_run_offline(tmp_path, server, monkeypatch):
    monkeypatch.setattr(Server, "status", 401)
    script = """
run = mirror("auto")
run.write(row(1))
run.close()
print(run.mode, run.reason)
try:
    mirror("online")
except UserError as error:
    print(error)
"""
    decision, refusal = in_a_process(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server).splitlines()
    assert decision == "offline the server refused the run: no such user"
    assert refusal == "logger.mode=online: wandb's server refused the run: no such user"
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_wandbs_own_process_dying_does_not_stop_a_run(tmp_path):
    script = """
import os, signal, subprocess
run = mirror("offline")
run.write(row(1))
for stat in Path("/proc").glob("[0-9]*/stat"):
    if stat.read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid()):
        os.kill(int(stat.parent.name), signal.SIGKILL)
time.sleep(0.5)
for step in range(2, 6):
    run.write(row(step))
run.close()
print(run.notice)
"""
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds the process in /proc")
    output = in_a_process(script, tmp_path, quiet=False)
    assert output.startswith("wandb: off (wandb's own process ended (ConnectionResetError))")


def test_a_user_without_a_home_folder_is_told_so_in_one_line(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("WANDB_CONFIG_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr("wandb.setup", lambda settings: Path("~/.config").expanduser())
    with pytest.raises(UserError, match=r"^wandb cannot be used: .* Set HOME; logger=none needs no home folder$"):
        _quiet_wandb()
