"""The README says only what is true: its commands run, its table is the published one, its rooms are the folders."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from scripts_here import run_here
from small import TINY_RUN, bench_words, run_small, smoke_overrides

import attnbench
from attnbench import ROOMS
from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.comparison.compare import compare
from attnbench.comparison.run_model import run
from attnbench.results.rows import is_complete

ELSEWHERE = {
    "make demo": "by hand before every release: it takes minutes",
    "make test": "this test runs in it",
    "source .venv/bin/activate": "changes the shell alone",
    "wandb leet": "test_mirror.py, which inspects an offline run with it",
    "wandb sync wandb/offline-run-*": "needs wandb's server",
    "python scripts/train.py -m hydra/launcher=submitit_slurm device=cuda hydra.launcher.gpus_per_node=1 "
    "hydra.launcher.timeout_min=600 attn=softmax,linear": "needs a Slurm cluster",
    "python scripts/train.py attn=linear data=hub data.name=Salesforce/wikitext data.config=wikitext-103-raw-v1": (
        "needs the Hugging Face Hub; test_hub.py loads a folder laid out as one of its data sets"
    ),
    "python scripts/train.py attn=gated_deltanet eval=battery": "test_docs.py, where another mixer goes through it",
}
"""Commands of the README that are not run here, and who does it."""


def blocks(root: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


def commands(script: str = "") -> list[str]:
    """The command lines of the README, or those of one script."""
    root = Path(__file__).resolve().parents[2]
    lines = "\n".join(blocks(root, "bash")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip() and script in line]


def of_script(script: str) -> pytest.MarkDecorator:
    """Its lines; a sweep starts a process of its own for what takes a line beside it a second."""
    lines = [line for line in commands(script) if line not in ELSEWHERE]
    slow = [pytest.param(line, marks=pytest.mark.slow) if " -m " in line else line for line in lines]
    return pytest.mark.parametrize("command", slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all commands leave what they make; holds a text to train on."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return folder


def compare_small(folder: Path) -> list[str]:
    """What makes a line of compare.py do with few evaluations and seeds what it would do with all."""
    own = ["experiment=demo", *TINY_RUN, *smoke_overrides("recall"), f"data.path={folder}/my_text.txt"]
    plan = {"overrides": own, "evaluations": ["recall"], "learning_rates": [1e-3], "num_workers": 1}
    words = [f"plan.{name}={json.dumps(value)}" for name, value in plan.items()]
    return [*words, f"outputs_dir={folder}", "logger=none", "device=cpu"]


def call(script: str, *words: str) -> str:
    """What a command printed that went well."""
    code, output, errors = run_here(Path(script).name, *words)
    assert code == 0, errors
    assert "Traceback" not in errors
    return output + errors


def call_process(root: Path, *words: str, given: str = "") -> str:
    """The same in a process of its own, with something on its standard input."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=root, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    """A run for evaluate.py."""
    call("scripts/train.py", "attn=softmax", "eval=[]", *run_small(folder))
    (path,) = (folder / "default").glob("softmax-*")
    return path


@pytest.fixture(scope="module")
def compared(folder) -> Path:
    """A comparison for report.py, export= and import=: the demo, small, and its cells in a file."""
    said = call("scripts/compare.py", "plan=demo", *compare_small(folder))
    call("scripts/compare.py", "plan=demo", f"export={folder / 'cells.jsonl'}", *compare_small(folder))
    header = next(line.split() for line in said.splitlines() if line.lstrip().startswith("softmax"))
    assert header == ["softmax", "flash", "linear", "gated_deltanet"]
    assert re.search(r"recall at 16, 2(\s+[01]\.?\d*){4}\s*\n", said), said
    assert "Exploratory" in said
    assert (folder / "demo" / "report" / "index.html").exists()
    return folder / "demo"


@of_script("train.py")
def test_a_training_runs(root, folder, command):
    _, script, *words = shlex.split(command)
    if "--help" in words:
        assert "batch_size: 128" in call_process(root, script, *words)
        return
    words = [word for word in words if not word.startswith("seq_len=")]
    evaluations = ("recall", "copy") if any("recall" in word for word in words) else ("perplexity",)
    words += [*run_small(folder), *smoke_overrides(*evaluations)]
    if any("submitit" in word for word in words):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if "-m" in words:
        said = call_process(root, script, *words)
        assert all(f"{mixer}-" in said for mixer in ("softmax", "flash", "linear", "gated_deltanet"))
    else:
        # In this process, which has loaded torch already.
        assert is_complete(next(run(compose(words)).glob("results/training-*.jsonl")))


@of_script("evaluate.py")
def test_an_evaluation_of_what_was_trained_runs(trained, command):
    _, script, *words = shlex.split(command)
    words = [f"run={trained}" if word.startswith("run=") else word for word in words]
    said = call(script, *words, *smoke_overrides("perplexity", "recall"), "device=cpu")
    assert "recall" in said
    assert list(trained.glob("results/perplexity-*.jsonl"))


@of_script("generate.py")
def test_a_prompt_is_continued(root, trained, command):
    before, _, own = command.rpartition("|")
    words = [f"run={trained}" if word.startswith("run=") else word for word in shlex.split(own)[1:]]
    said = call_process(root, *words, "num_tokens=20", "device=cpu", given=" ".join(shlex.split(before)[1:]))
    assert said.count("the history of") == (4 if "num_samples=4" in words else 1)


@of_script("compare.py")
def test_a_comparison_is_what_its_line_says(folder, compared, caplog, command):
    words = [word.replace("cells.jsonl", str(folder / "cells.jsonl")) for word in shlex.split(command)[2:]]
    if not any(word.startswith("export=") for word in words):
        # The fixture carried one out; of the others it is enough that they would run.
        words.append("plan.dry_run=true")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("compare", [*words, *compare_small(folder)], return_hydra_config=True)
        with caplog.at_level("INFO"):
            compare(read_comparison(config, config.hydra), compose)
    if "plan=demo" in words:
        assert re.search(r"\d+ cells written to|done  recall softmax", caplog.text)
        assert "to do" not in caplog.text
    else:
        assert "to do" in caplog.text
    if any(word.startswith("import=") for word in words):
        assert "0 cells taken over" in caplog.text


@of_script("report.py")
def test_a_report_is_made(folder, compared, command):
    _, script, *words = shlex.split(command)
    assert "index.html" in call(script, *(word.replace("outputs", str(folder)) for word in words))


@of_script("prepare_data.py")
def test_the_data_come_or_a_line_says_why_not(root, tmp_path, command):
    _, script, *words = shlex.split(command)
    words = [sys.executable, script, *words, "--root", str(tmp_path)]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120)
    if done.returncode:
        assert re.fullmatch(r"error: .*huggingface\.co.*\n", done.stderr), done.stderr


@of_script("doctor.py")
def test_the_doctor_finds_what_runs_here_right(folder, command):
    said = call(*shlex.split(command)[1:], "mixers=[softmax]", "device=cpu", f"outputs_dir={folder}")
    assert re.search(r"softmax +torch\* +bfloat16 +right( +\d\.\de-\d\d){4}\n", said), said


@of_script("benchmark.py")
def test_a_table_of_operators_is_made(folder, run_benchmark, command, capsys):
    _, _, *words = shlex.split(command)
    name = words[0].removeprefix("bench=")
    run_benchmark(*words, *bench_words(name), "device=cpu", f"outputs_dir={folder}")
    said = capsys.readouterr().out
    assert f"{folder}/benchmark/{name}/float32-" in said
    assert "roofline" in said


def test_every_command_is_run_by_somebody():
    those = (
        *("train.py", "evaluate.py", "generate.py", "compare.py", "report.py", "prepare_data.py", "doctor.py"),
        "benchmark.py",
    )
    lines = {line for script in those for line in commands(f"python scripts/{script}")}
    assert set(commands()) == lines | set(ELSEWHERE)


def test_the_battery_is_the_six_of_the_table(root):
    section = (root / "README.md").read_text().partition("## The battery")[2].partition("\n## ")[0]
    names = re.findall(r"^\| (\w+) \|", section, re.MULTILINE)
    assert names == [evaluation.name for evaluation in compose(["eval=battery", "device=cpu"]).evaluations]


def test_the_python_runs(root, folder, trained):
    code = "\n".join(blocks(root, "python"))
    overrides = ", ".join(repr(word) for word in [*run_small(folder), *smoke_overrides("perplexity")])
    code = code.replace('"experiment=demo"', f'"experiment=demo", {overrides}').replace(
        "outputs/default/RUN", str(trained)
    )
    said = call_process(root, "-c", code)
    assert "bits_per_character" in said
    # Behind the rows stands a text, of the letters that the run has read.
    assert len(re.sub(r"[^a-z ]", "", said.splitlines()[-1])) > 20


def test_the_names_that_python_gets_are_of_attnbench_itself(root):
    code = "\n".join(blocks(root, "python"))
    shown = {
        alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert "compose" in shown
    assert "attnbench." not in code
    assert shown <= set(attnbench.__all__)
    assert all(callable(getattr(attnbench, name)) for name in attnbench.__all__)
    # What only imports the package waits for neither torch nor Hydra.
    loaded = "import attnbench, sys; print({'torch', 'hydra'} & set(sys.modules), attnbench.compose.__module__)"
    assert call_process(root, "-c", loaded) == "set() attnbench.cli.compose\n"


@pytest.mark.parametrize("published", ["language_model-h200", "battery-h200"])
def test_a_table_of_results_is_the_published_one(root, published):
    page = (root / "docs" / "results" / published / "README.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert table in (root / "README.md").read_text()


def test_the_rooms_are_named_in_their_order(root):
    table = (root / "README.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == ["room", *ROOMS]
