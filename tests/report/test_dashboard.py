"""The workspace shows every evaluation and every plot of conf/eval, and without a login it is a file."""

import dataclasses
import json
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from scripts_here import run_here
from small import python_path
from wandb_server import KEY, Server

from attnbench.evals.base import Evaluation
from attnbench.report.sections.words import heading
from attnbench.report.workspace import ROWS, TABLES, chart_key, score_key
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF, RunSettings

pytest.importorskip("wandb_workspaces", reason="needs the extra `dashboards`")

NO_NETWORK = """
import runpy, socket, sys

def refuse(*arguments, **options):
    raise AssertionError("the network was asked for")

def connect(self, address, connect=socket.socket.connect):
    # wandb speaks with its own process through a file.
    return connect(self, address) if self.family == socket.AF_UNIX else refuse()

if {is_offline}:
    socket.getaddrinfo, socket.socket.connect = refuse, connect
{more}
sys.argv = ["scripts/dashboard.py", *{words!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def dashboard(
    root: Path, folder: Path, *words: str, more: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in python_path(root).items() if not name.startswith("WANDB")}
    code = NO_NETWORK.format(
        words=list(words), script=str(root / "scripts" / "dashboard.py"), more=more, is_offline=not variables
    )
    variables |= {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**inherited, **variables},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


BEFORE = """
sys.argv = ["scripts/dashboard.py"]
runpy.run_path("{script}", run_name="__main__")
"""


def test_without_a_login_it_is_a_file_that_names_every_evaluation_and_plot(root, tmp_path):
    # The same process is then asked for what cannot be.
    first = BEFORE.format(script=root / "scripts" / "dashboard.py")
    done = dashboard(root, tmp_path, "--mode", "online", more=first)
    assert done.stdout == "dashboard: outputs/dashboard.json, not published: not logged in\n", done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: logger.mode=online: not logged in; `wandb login` logs in")
    content = json.loads((tmp_path / "outputs" / "dashboard.json").read_text())
    sections = {part["name"]: part["panels"] for part in content["section"]["panelBankConfig"]["sections"]}
    evaluations = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "eval").glob("*.yaml")}
    del evaluations["battery"], evaluations["ladder"]
    assert len(evaluations) >= 6
    assert set(sections) == {"Results", *map(heading, evaluations), "Training", "Trained length"}
    for name, options in evaluations.items():
        plots = resolve(options["_target_"], Evaluation).plots
        keys = [score_key(name), *(chart_key(name, metric, axis) for metric, axis in plots)]
        tables = [f"{key}_table" for key in keys]
        shown = json.dumps(sections[heading(name)])
        assert len(tables) == len(sections[heading(name)]) > 1
        assert all(f'"{table}"' in shown for table in tables)
    wide = map(json.dumps, sections["Results"])
    assert all(f'"{name}"' in panel for name, panel in zip(TABLES, wide, strict=True))
    curves = [panel["config"] for panel in sections["Training"]]
    assert all(curve["xAxis"] == "tokens" for curve in curves)
    assert ["loss"] in [curve["metrics"] for curve in curves]
    assert "seq_len" in {field.name for field in dataclasses.fields(RunSettings)}, "the configuration of a run has it"
    assert {panel["config"]["xAxis"] for panel in sections["Trained length"]} == {"config:seq_len.value"}
    shown = {panel["config"]["yAxis"].removeprefix("summary:") for panel in sections["Trained length"]}
    assert shown == {"tokens_per_second", *(name for curve in curves for name in curve["metrics"] if "/" in name)}


def test_without_its_library_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    code, _, errors = run_here("dashboard.py", cwd=tmp_path)
    assert code == 1
    assert errors == "error: the dashboard needs wandb-workspaces: pip install 'wandb-workspaces>=0.4,<0.5'\n"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 403])
def test_with_a_login_it_is_published(root, tmp_path, monkeypatch, status):
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "status", status)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    server = f"http://127.0.0.1:{running.server_port}"
    done = dashboard(root, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server)
    running.shutdown()
    running.server_close()
    if status == 200:
        assert (done.stdout, done.returncode) == (f"dashboard: {server}/me/attnbench?nw=abc\n", 0), done.stderr
        (view,) = (variables for variables in Server.asked if "spec" in variables)
        assert (view["entityName"], view["projectName"]) == ("me", "attnbench")
        assert ROWS in view["spec"]
        assert score_key("ladder_recall") in view["spec"]
    else:
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("error: wandb refused the dashboard: ")
    assert not (tmp_path / "outputs").exists()
