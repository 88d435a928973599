"""attnbench new: what it writes keeps the contract, and is what the documentation shows."""

import importlib
import subprocess
import sys

import pytest
from pages import files
from scripts_here import run_here
from write_yamls import as_yaml

from attnbench.cli.new import write_mixer
from attnbench.settings.errors import UserError


def test_it_writes_a_mixer_its_yaml_a_plan_and_a_test(tmp_path):
    code, said, errors = run_here("new", "mixer", "two_words", cwd=tmp_path)
    assert code == 0, errors
    written = ["two_words.py", "conf/attn/two_words.yaml", "conf/plan/two_words.yaml", "test_two_words.py"]
    assert said.splitlines()[:4] == written
    assert all((tmp_path / name).is_file() for name in written)
    assert "class TwoWords(RecurrentMixer)" in (tmp_path / "two_words.py").read_text()
    assert "attnbench compare plan=two_words" in said


def test_the_class_is_the_page_s_and_the_yaml_has_its_options(tmp_path, monkeypatch):
    write_mixer("fades", tmp_path)
    assert (tmp_path / "fades.py").read_text() == files("docs/adding_a_mixer.md")["fades.py"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fades", raising=False)
    cls = importlib.import_module("fades").Fades
    assert (tmp_path / "conf" / "attn" / "fades.yaml").read_text() == as_yaml(cls, "fades.Fades")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Fades", "lower-case"),
        ("a-b", "lower-case"),
        ("class", "lower-case"),
        ("softmax", "attnbench has"),
        ("demo", "a plan of this name"),
        ("json", "module"),
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(tmp_path, name, reason):
    with pytest.raises(UserError, match=reason):
        write_mixer(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_the_repository_stays_as_it_is(tmp_path, root):
    (tmp_path / "test_mine.py").write_text("mine")
    with pytest.raises(UserError, match=r"test_mine\.py"):
        write_mixer("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    with pytest.raises(UserError, match="attnbench's own"):
        write_mixer("mine", root)


@pytest.mark.slow
def test_what_it_writes_keeps_the_contract_and_joins_a_comparison(tmp_path):
    write_mixer("fades_slowly", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "test_fades_slowly.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    words = ["plan=fades_slowly", "plan.dry_run=true", "logger=none", "device=cpu"]
    code, said, errors = run_here("compare", *words, cwd=tmp_path)
    assert code == 0, errors
    assert "recall fades_slowly" in said + errors
