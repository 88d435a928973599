"""The command `attnbench`: what it lists, what it refuses, and an installation without the clone."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from pages import MY_LAYER
from scripts_here import run_here

from attnbench.cli.commands import COMMANDS, DEMO
from attnbench.cli.compose import CONF
from attnbench.comparison.compare import OWN_LAYER


def test_alone_it_lists_every_command_within_100_columns():
    code, said, _ = run_here("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"  attnbench {name} " in said
    assert max(map(len, said.splitlines())) <= 100
    assert {path.stem for path in CONF.glob("*.yaml")} <= COMMANDS.keys()


def test_the_version_is_the_package_s():
    assert run_here("--version")[1].startswith("attnbench 0.")


def test_an_unknown_command_is_one_line_that_names_the_near_one():
    code, said, errors = run_here("trian")
    assert (code, said) == (1, "")
    assert errors == "error: trian: no such command (did you mean train?); attnbench alone lists them\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_starts_no_torch(name, root):
    program = (
        "import sys\nfrom attnbench.cli.commands import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, name, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_word_of_the_demo_takes_the_place_of_its_own(tmp_path):
    code, said, errors = run_here("demo", "logger=none", "plan.dry_run=true", "plan.only=[recall]", cwd=tmp_path)
    assert code == 0, errors
    assert "logger=offline" in DEMO
    assert "recall softmax" in said + errors


def test_the_word_that_a_comparison_prints_adds_a_layer_of_the_folder(tmp_path):
    shutil.copy(MY_LAYER, tmp_path)
    words = [OWN_LAYER, "plan.only=[recall]", "plan.dry_run=true", "logger=none"]
    code, said, errors = run_here("demo", *words, cwd=tmp_path)
    assert code == 0, errors
    assert "to do  recall mine" in said + errors


def test_yamls_and_classes_of_the_folder_are_found(tmp_path):
    shutil.copy(MY_LAYER, tmp_path)
    (tmp_path / "conf" / "attn").mkdir(parents=True)
    own = yaml.safe_load((CONF / "attn" / "module.yaml").read_text()) | {"path": "my_layer:MyLayer"}
    (tmp_path / "conf" / "attn" / "mine.yaml").write_text(yaml.safe_dump(own))
    words = ["attn=mine", "experiment=demo", "train.num_epochs=null", "train.num_steps=1", "eval=[]", "logger=none"]
    code, _, errors = run_here("train", *words, "device=cpu", "train.batch_size=1", cwd=tmp_path)
    assert code == 0, errors
    assert "conf/ of this folder" in errors
    assert list((tmp_path / "outputs" / "demo").glob("mine-*"))


def test_a_yaml_of_the_folder_takes_the_place_of_none(tmp_path):
    (tmp_path / "conf" / "attn").mkdir(parents=True)
    own = yaml.safe_load((CONF / "attn" / "linear.yaml").read_text())
    (tmp_path / "conf" / "attn" / "linear.yaml").write_text(yaml.safe_dump(own | {"conv_size": 7}))
    code, said, errors = run_here("train", "attn=linear", "--help", cwd=tmp_path)
    assert code == 0, errors
    assert f"conv_size: {own['conv_size']} " in said


@pytest.mark.slow
def test_a_wheel_alone_trains_and_compares_from_any_folder(root, tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(root)]
    subprocess.run([*build, "--wheel-dir", str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("attnbench-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert {f"attnbench/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")} <= names
    assert len([name for name in names if name.startswith("attnbench/ops/attention/cuda/") and ".cu" in name]) >= 2
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, env=environment, cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # The libraries of this environment, but not its attnbench: of an editable install only a .pth file leads there.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries))
    folder = tmp_path / "elsewhere"
    folder.mkdir()

    def attnbench(*words: str) -> str:
        command = [python.with_name("attnbench"), *words]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    where = "import attnbench; print(attnbench.__file__)"
    found = subprocess.run([python, "-c", where], cwd=folder, env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(site)
    few = ["train.num_epochs=null", "train.num_steps=2", "eval=[]", "device=cpu", "logger=none"]
    attnbench("train", "attn=linear", "experiment=demo", *few)
    assert list((folder / "outputs" / "demo").glob("linear-*"))
    few = ["plan.only=[recall]", "plan.variants.flash=null", "plan.probe_seeds=[0]", "eval.recall.num_steps=2"]
    attnbench("demo", *few[:3], "logger=none", f"plan.overrides={_shortened(root)}")
    assert (folder / "outputs" / "demo" / "report" / "index.html").exists()


def _shortened(root: Path) -> str:
    """Overrides of plan=demo, with two steps of each probe."""
    overrides = yaml.safe_load((root / "conf" / "plan" / "demo.yaml").read_text())["overrides"]
    return "[" + ",".join(f"'{word}'" for word in [*overrides, "eval.recall.num_steps=2"]) + "]"
