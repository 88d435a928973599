"""The pages of docs/ say only what is true: their examples live in a package of their own and go all the way."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts_here import run_here
from small import TINY_RUN, compose_once, python_path, smoke_overrides

from attnbench.evals.base import Probe
from attnbench.mixers.contract import PROMISES
from attnbench.settings.registry import build

BATTERY = ("recall", "copy", "perplexity", "throughput", "memory", "scaling")


class Package:
    """A user's own folder, with the files that a page shows: each code block whose text before it names its file."""

    def __init__(self, root: Path, folder: Path, page: str) -> None:
        self.root, self.folder = root, folder
        text = (root / "docs" / page).read_text()
        self.files = dict(re.findall(r"`([\w./]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", text, re.DOTALL))
        assert len(self.files) == text.count("```") // 2, "a block without the name of its file, or the reverse"
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
        self.overrides = [*TINY_RUN, f"data.path={folder / 'text.txt'}"]

    def python(self, *words: str) -> str:
        """Standard output and error of a Python that finds the package and attnbench."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=python_path(self.folder, self.root, self.root / "tests"),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def script(self, name: str, *words: str) -> str:
        common = ["--config-dir", "my_conf", "device=cpu"]
        return self.python(str(self.root / "scripts" / name), *common, *words)

    def script_here(self, name: str, *words: str) -> str:
        """The same of a script that starts no process, without one of its own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(self.folder)
            code, output, errors = run_here(name, "--config-dir", "my_conf", "device=cpu", *words, cwd=self.folder)
        assert code == 0, output + errors
        return output + errors

    def compare(self, variant: str, *evaluations: str) -> Path:
        """Carries out a plan of one variant at the size of a smoke test; returns the experiment's folder."""
        plan = {
            "overrides": ["experiment=demo", *self.overrides],
            "variants": {variant: [f"attn={variant}"]},
            "evaluations": list(evaluations),
            **{"seeds": [0], "probe_seeds": [0], "learning_rates": [1e-3]},
        }
        (self.folder / "my_conf" / "plan" / "little.yaml").write_text(yaml.safe_dump(plan))
        self.script("compare.py", "plan=little", "logger=none")
        return self.folder / "outputs" / "little"


@pytest.fixture(scope="module")
def mixer(root, tmp_path_factory) -> Package:
    return Package(root, tmp_path_factory.mktemp("mixer"), "adding_a_mixer.md")


@pytest.fixture(scope="module")
def evaluation(root, tmp_path_factory) -> Package:
    return Package(root, tmp_path_factory.mktemp("evaluation"), "adding_an_evaluation.md")


def test_the_example_mixer_keeps_the_contract(mixer):
    words = ["-v", "-p", "no:cacheprovider", "-k", "fading", str(mixer.root / "tests" / "test_mixers.py")]
    said = mixer.python(
        "-c",
        "import sys, pathlib, pytest, mixer_building\n"
        "mixer_building.CONF = pathlib.Path('my_conf/attn').resolve()\n"
        f"sys.exit(pytest.main({words}))",
    )
    assert len(re.findall(r"fading\] PASSED", said)) > 25, said
    assert "softmax]" not in said


def test_the_doctor_runs_the_contract_on_the_example_mixer(mixer):
    said = mixer.script_here("doctor.py", "mixers=[fading]")
    kept = re.findall(r"^  (\S.*?) {2,}kept$", said, re.MULTILINE)
    assert kept == [promise.words for promise in PROMISES]


def test_the_example_mixer_takes_all_that_evaluations_put_around_every_mixer(mixer):
    """So that nothing stands beside its scores as what it did not get."""
    settings = yaml.safe_load(mixer.files["my_conf/attn/fading.yaml"])
    for probe in ("recall", "copy"):
        evaluation = compose_once([f"eval=[{probe}]"]).evaluations[0]
        for task in build(evaluation.target, evaluation.options, Probe).tasks():
            assert task.mixer_options
            assert task.mixer_options.keys() <= settings.keys()


@pytest.mark.slow
def test_the_example_mixer_trains_and_goes_through_the_battery_into_the_report(mixer):
    assert "fading-" in mixer.script("train.py", "attn=fading", "experiment=demo", *mixer.overrides, "logger=none")
    mixer.overrides += smoke_overrides(*BATTERY)
    folder = mixer.compare("fading", *BATTERY)
    record = json.loads((folder / "comparison.json").read_text())
    assert record["failures"] == []
    assert {Path(name).name.split("-")[0] for name in record["files"]} == {"training", *BATTERY}
    assert "fading" in (folder / "report" / "index.html").read_text()


def test_the_plan_of_the_example_mixer_is_the_demo_and_one_more(mixer):
    said = mixer.script_here("compare.py", "plan=fading", "plan.dry_run=true")
    assert all(f"throughput {name}\n" in said for name in ("fading", "softmax", "flash", "linear", "gated_deltanet"))


@pytest.mark.slow
def test_the_example_evaluations_go_through_train_evaluate_and_compare_into_the_report(evaluation):
    few = ["eval.parity.lengths=[12]", "eval.parity.num_steps=3", "eval.parity.learning_rates=[1e-3]"]
    command = ("attn=softmax", "experiment=demo", "eval=[parity]", *few, *evaluation.overrides, "logger=none")
    said = evaluation.script("train.py", *command)
    assert "parity" in said
    (run,) = (path.parent for path in (evaluation.folder / "outputs" / "demo").glob("*/checkpoint"))
    evaluation.script("evaluate.py", f"run={run}", "eval=[next_character]")
    assert list((run / "results").glob("next_character-*.jsonl"))

    evaluation.overrides += few
    folder = evaluation.compare("linear", "parity", "next_character")
    record = json.loads((folder / "comparison.json").read_text())
    assert record["failures"] == []
    assert "--config-dir my_conf" in record["command"]
    page = (folder / "report" / "index.html").read_text()
    for words in ("Parity</h2>", "whether the ones so far are odd", "Next character</h2>", "most likely ones"):
        assert words in page, words
    figures = {path.stem for path in (folder / "report" / "figures").glob("*.svg")}
    assert figures == {"parity-accuracy-length", "next_character-accuracy-checkpoint"}


def test_the_plan_of_the_example_evaluation_is_what_the_page_says(evaluation):
    said = evaluation.script_here("compare.py", "plan=parity", "plan.dry_run=true")
    assert said.count("search") >= 3 * 2 * 2
    assert "parity negative_eigenvalues, length 32, lr 0.01, search" in said


def test_the_smoke_settings_of_the_example_are_options_it_has(evaluation):
    settings = yaml.safe_load(evaluation.files["my_conf/eval/parity.yaml"])
    names = "import json, parity; print(json.dumps(parity.Parity.smoke))"
    assert json.loads(evaluation.python("-c", names)).keys() <= settings.keys()
