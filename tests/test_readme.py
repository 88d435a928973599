"""The README says only what is true: its commands run, its table is the published one, its tree is the files."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [
    "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "match=none", "data=text",
    "train.num_epochs=null", "train.num_steps=2", "train.batch_size=2", "train.warmup_steps=1", "seq_len=16",
    "eval.perplexity.extrapolation=[]", "logger=none", "device=cpu",
]  # fmt: skip
ELSEWHERE = {
    "make demo": "by hand before every release: it takes minutes",
    "make test": "this test runs in it",
    "source .venv/bin/activate": "changes the shell alone",
    "wandb leet": "test_mirror.py, which inspects an offline run with it",
    "wandb sync wandb/offline-run-*": "needs wandb's server",
}


def blocks(root: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


def commands() -> list[str]:
    root = Path(__file__).resolve().parents[1]
    lines = "\n".join(blocks(root, "bash")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my_text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return path


@pytest.mark.parametrize("command", [line for line in commands() if line not in ELSEWHERE])
def test_a_command_of_the_readme_runs(root, tmp_path, text, command):
    program, script, *words = shlex.split(command)
    assert program == "python", f"{command}: run it in a test, or say in ELSEWHERE who does"
    if script.endswith("prepare_data.py"):
        words += ["--root", str(tmp_path)]
    elif "--help" not in words:
        words = [word for word in words if not word.startswith("seq_len=")]
        words += [*SMALL, f"data.path={text}", f"outputs_dir={tmp_path}"]
    done = subprocess.run([sys.executable, script, *words], cwd=root, capture_output=True, text=True, timeout=120)
    if script.endswith("prepare_data.py") and done.returncode:
        # Without a network it can only say so, in a line.
        assert re.fullmatch(r"error: .*huggingface\.co.*\n", done.stderr), done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    if "-m" in words:
        assert all(f"{mixer}-" in done.stdout for mixer in ("softmax", "flash", "linear", "gated_deltanet"))


def test_every_command_that_is_run_elsewhere_still_stands_in_the_readme():
    assert set(ELSEWHERE) <= set(commands())


def test_the_python_of_the_readme_runs(root, tmp_path, text):
    (code,) = blocks(root, "python")
    overrides = ", ".join(repr(word) for word in [*SMALL, f"data.path={text}", f"outputs_dir={tmp_path}"])
    code = code.replace('"experiment=demo"', f'"experiment=demo", {overrides}')
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bits_per_character" in done.stdout


def test_the_results_table_is_the_published_one(root):
    published = (root / "docs" / "results" / "language_model-h200" / "README.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", published, re.MULTILINE)
    assert table in (root / "README.md").read_text()


def test_the_tree_names_every_file(root):
    tree = (root / "README.md").read_text().partition("## The tree")[2].partition("\n## ")[0]
    files = [*root.glob("attnbench/**/*.py"), *root.glob("scripts/*.py"), *root.glob("conf/*/")]
    missing = [path.name for path in files if path.name != "__init__.py" and path.name not in tree]
    assert not missing
    named = re.findall(r"^\s+(\w+\.py)\b", tree, re.MULTILINE)
    assert set(named) <= {path.name for path in files}
