"""Every command line of README.md and docs/ runs, in a user's folder and at the size of a smoke test."""

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from pages import EXAMPLES, MY_LAYER, blocks, commands, files, write_files
from probe_settings import BATTERY, EVALUATIONS, smoke_words
from scripts_here import run_here
from small import BENCHES, TINY_RUN, compose_once, in_this_process, python_path

from attnbench.cli.compose import CONF
from attnbench.comparison import workers
from attnbench.evals.base import Probe
from attnbench.mixers.contract import PROMISES
from attnbench.model.building import build_meta
from attnbench.settings.registry import build

ELSEWHERE = {
    "make demo": "by hand before every release: it takes minutes",
    "attnbench demo plan.recipe=bare 'plan.only=[recall,copy]' "
    "'plan.variants.mine=[attn=module,attn.path=my_layer:MyLayer]'": "test_command.py, a dry run",
    "attnbench new mixer fades": "test_new.py",
    "attnbench doctor 'mixers=[fades]' quick=true": "test_new.py",
    "attnbench compare plan=fades": "test_new.py, a dry run",
    "make findings": "by hand before every release: it takes minutes; test_findings.py, at smoke size",
    "attnbench findings conv_recall freeze=true": "test_findings.py, at smoke size",
    "attnbench findings conv_recall": "test_findings.py, at smoke size",
    "attnbench findings": "test_findings.py, at smoke size",
    "attnbench findings conv_recall plan.dry_run=true": "test_findings.py, at smoke size",
    "make test": "these tests are it",
    "pip install 'flash-linear-attention>=0.6,<0.7' flash-qla": "needs a GPU; rows of what is absent say so",
    "source .venv/bin/activate": "changes the shell alone",
    "attnbench train attn=gated_deltanet eval=battery": "below, with the example mixer",
    "wandb leet": "test_mirror.py, which looks at an offline run with it",
    "wandb sync wandb/offline-run-*": "needs wandb's server",
    "attnbench data": "downloads; test_wikitext.py, from a folder and without a network",
    "attnbench data books": "downloads; test_books.py, from a folder and without a network",
    "attnbench doctor": "test_doctor.py, on all mixers",
    "attnbench compare plan=compare 'plan.corpora=[wikitext2,embedded]'": "test_corpora.py, at smoke size",
    "attnbench compare plan=recall_state": "test_recall_state.py composes it; its variants are of one ladder alone",
    "attnbench runs demo sort=perplexity": "test_runs_shown.py, by other metrics: runs of these tests have none",
    "attnbench runs 'compare=[1a2b3c4d,9f0e]'": "test_runs_shown.py, on runs of these names",
    "python -m attnbench.export.lm_eval --model attnbench --model_args run=outputs/default/RUN --tasks wikitext": (
        "downloads; test_harness.py, on a local document"
    ),
    "python tools/ladder_halves.py outputs/ladder": "test_ladder_halves.py, on made-up rows",
    "python tools/recall_state.py outputs/recall_state --figure recall_state.svg": "test_recall_state.py, likewise",
    "python scripts/dashboard.py": "test_dashboard.py, against a local server",
    "attnbench train -m hydra/launcher=submitit_slurm device=cuda hydra.launcher.gpus_per_node=1 "
    "hydra.launcher.timeout_min=600 attn=softmax,linear": "needs a Slurm cluster",
    "attnbench compare plan=compare device=cuda launcher=slurm slurm.partition=gpu slurm.gpus=1 "
    "slurm.tasks=16": "needs GPUs; test_slurm.py, on a cluster without",
    "attnbench compare plan=compare device=cuda plan.devices=all": (
        "needs GPUs; test_workers.py, that each worker sees one"
    ),
    "torchrun --nproc_per_node=2 -m attnbench train attn=gated_deltanet": "test_group.py, on a CPU",
    "attnbench train attn=linear data=hub data.name=Salesforce/wikitext data.config=wikitext-103-raw-v1": (
        "downloads; test_hub.py loads a folder laid out as one of the Hub's data sets"
    ),
    "attnbench train attn=linear data=wikitext103 train.num_tokens=200_000_000": (
        "downloads; test_hub.py, from a folder"
    ),
    "attnbench train attn=linear data=fineweb_edu data.tokenizer=bpe data.vocabulary_size=16384 "
    "train.num_tokens=1_000_000_000": "downloads; test_tokenizers.py, with a text of one's own",
    "attnbench train model=85m data=books data.tokenizer=bpe data.vocabulary_size=16384 seq_len=2048 "
    "train.batch_size=8": ("needs a GPU; below it composes, and test_tokenizers.py trains with such tokens"),
    "attnbench train -m attn=flash attn.backend=sdpa,cudnn,triton seq_len=256,1024 train.num_steps=150": (
        "needs a GPU"
    ),
}
"""Commands that are not run here: what runs them, or why nothing can."""

SLOW = ("submitit", "eval=battery")
"""Words of commands that start processes."""
FIRST = ("README.md", "docs/adding_a_mixer.md", "docs/adding_an_evaluation.md")
"""Pages whose commands run in every run of the tests."""

PYTHON = ("README.md", "docs/running.md", "docs/python.md")
"""Pages whose Python runs."""

TRAINING = [*TINY_RUN, "data.path=my_text.txt", "logger=none", "device=cpu"]
FEW = ["eval.echo.delays=[3]", "eval.echo.num_steps=3", "eval.echo.learning_rates=[1e-3]"]


def of_command(program: str) -> pytest.MarkDecorator:
    lines = [line for line in commands() if program in line and line not in ELSEWHERE]
    fast = {line for line in commands(*FIRST) if not any(word in line for word in SLOW)}
    return pytest.mark.parametrize(
        "command", [line if line in fast else pytest.param(line, marks=pytest.mark.slow) for line in lines]
    )


def words_of(command: str) -> list[str]:
    return shlex.split(re.split(r"attnbench \w+|scripts/\w+\.py", command, maxsplit=1)[1])


def smoke_of(words: list[str]) -> list[str]:
    """Smoke settings of the evaluations that a command line names, or of the one that it has by default."""
    named = " ".join(word for word in words if word.startswith("eval="))
    if "battery" in named:
        return smoke_words(*BATTERY)
    if "eval=ladder" in named:
        return smoke_words(*(name for name in EVALUATIONS if name.startswith("ladder_")))
    if "echo" in named:
        return FEW
    return smoke_words(*([name for name in EVALUATIONS if name in named] or ["perplexity"] * (not named)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder, in which all commands run: a text to train on and the files that pages show."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    write_files(folder, *EXAMPLES)
    shutil.copy(MY_LAYER, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", python_path(folder)["PYTHONPATH"])
        yield folder


def call(folder: Path, program: str, *words: str) -> str:
    code, output, errors = run_here(program, *words, cwd=folder)
    assert code == 0, output + errors
    assert "Traceback" not in errors
    return output + errors


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    call(folder, "train", "attn=softmax", "eval=[]", *TRAINING)
    (run,) = (folder / "outputs" / "default").glob("softmax-*")
    (folder / "outputs" / "default" / "RUN").symlink_to(run)
    return run


def plan_words(words: Sequence[str] = ("plan=demo",)) -> list[str]:
    overrides = ["experiment=demo", *TINY_RUN, *smoke_words("recall"), "data.path=my_text.txt"]
    plan = {
        "overrides": overrides,
        "evaluations": ["recall"],
        "learning_rates": [1e-3],
        "num_workers": 1,
        "tested": None,
    }
    if "plan=demo" in words:
        plan |= {"seeds": [0], "probe_seeds": [0]}
    else:
        # Some have dozens of variants, and test_plans.py composes each.
        yaml_of_plan = CONF / "plan" / f"{words[0].partition('=')[2]}.yaml"
        variants = yaml.safe_load(yaml_of_plan.read_text()).get("variants", {}) if yaml_of_plan.exists() else {}
        plan |= {f"variants.{name}": None for name in list(variants)[2:]}
    return [*(f"plan.{name}={json.dumps(value)}" for name, value in plan.items()), "logger=none", "device=cpu"]


@pytest.fixture(scope="module")
def compared(folder) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_in_processes", in_this_process)
        said = call(folder, "compare", "plan=demo", *plan_words())
    header = next(line.split() for line in said.splitlines() if line.lstrip().startswith("softmax"))
    assert header == ["softmax", "flash", "linear", "gated_deltanet"]
    assert re.search(r"pairs recalled.*?(\s+\d+){4}\s*\n", said), said
    assert "Nothing is tested in this plan: 1 seed cannot rank mixers." in " ".join(said.split())
    assert (folder / "outputs" / "demo" / "report" / "index.html").exists()
    call(folder, "compare", "plan=demo", "export=cells.jsonl", *plan_words())


@of_command("attnbench train")
def test_a_training_runs(folder, command):
    words = [word for word in words_of(command) if not word.startswith("seq_len=")]
    if "--help" in words:
        assert "batch_size: 128" in call(folder, "train", *words)
        return
    words += [*TRAINING, *smoke_of(words)]
    if any("submitit" in word for word in words):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    said = call(folder, "train", *words)
    if "-m" in words:
        assert all(f"{mixer}-" in said for mixer in ("softmax", "flash", "linear", "gated_deltanet"))
    else:
        (run,) = re.findall(r"outputs/\w+/\S+-[0-9a-f]{8}/", said.replace("\n", " "))[-1:]
        assert [*(folder / run).glob("results/training-*.jsonl")]


def test_the_large_model_composes_and_has_the_parameters_that_its_page_says():
    (command,) = (line for line in commands("docs/running.md") if "model=85m" in line)
    settings = compose_once(words_of(command))
    mixers = [settings.mixer] * settings.model.num_layers
    sizes = {size: build_meta(mixers, settings.model, vocabulary_size=size).num_parameters() for size in (16384, 50257)}
    assert (settings.data.name, settings.data.tokenizer, settings.data.vocabulary_size) == ("books", "bpe", 16384)
    assert round(sizes[50257] / 1e6) == 124
    assert round((sizes[50257] - 50257 * settings.model.dim) / 1e6) == 85
    assert sizes[50257] - sizes[16384] == (50257 - 16384) * settings.model.dim


@of_command("attnbench evaluate")
def test_an_evaluation_of_what_was_trained_runs(folder, trained, command):
    words = words_of(command)
    call(folder, "evaluate", *words, *smoke_of(words), "device=cpu")
    if "eval=ladder" in words:
        assert len({path.name.split("-")[0] for path in (trained.parent / "cells").glob("ladder_*")}) == 4
        return
    name = "next_character" if "eval=[next_character]" in words else "perplexity"
    assert list(trained.glob(f"results/{name}-*.jsonl"))


@of_command("attnbench generate")
def test_a_prompt_is_continued(folder, trained, command, monkeypatch):
    given = " ".join(shlex.split(command.partition("|")[0])[1:]) if "|" in command else ""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    words = words_of(command)
    said = call(folder, "generate", *words, "num_tokens=20", "device=cpu")
    assert said.count("the history of") == (4 if "num_samples=4" in words else 1)


@of_command("attnbench export")
def test_a_run_leaves(folder, trained, command):
    said = call(folder, "export", *words_of(command))
    made = folder / "my_model" if "my_model" in command else trained / "huggingface"
    assert f"{made.name}/: " in said
    assert (made / "modeling_attnbench.py").exists()
    shutil.rmtree(made)


@of_command("attnbench compare")
def test_a_comparison_is_what_its_line_says(folder, compared, command):
    words = words_of(command)
    if "freeze=true" in words:
        assert "frozen: outputs/" in call(folder, "compare", *words, *plan_words(words))
        return
    if not any(word.startswith("export=") for word in words):
        # The fixture carried one out; of the others it is enough that they would run.
        words.append("plan.dry_run=true")
    for carried in [word.removeprefix("import=") for word in words if word.startswith("import=")]:
        export = ["plan=demo", f"export={carried}"]
        call(folder, "compare", *export, *plan_words(export))
    said = call(folder, "compare", *words, *plan_words(words))
    if words == ["plan=demo", "plan.dry_run=true"]:
        assert "done  recall softmax" in said
        assert "to do" not in said
    elif any(word.startswith("export=") for word in words):
        assert re.search(r"\d+ results written to", said)
    elif any(word.startswith("import=") for word in words):
        assert "0 results taken over" in said
    else:
        # Done are those that a slow test of this folder has run.
        assert re.search(r"^ +(to do|done)  (recall|copy|training|throughput) ", said, re.MULTILINE)


@of_command("attnbench runs")
def test_runs_are_listed(folder, trained, compared, command):
    words = words_of(command.partition("|")[0])
    last = call(folder, "runs", *words).splitlines()[0].split("\t")[-1]
    assert last == ("scores" if "demo" in words else "bytes")


@of_command("attnbench report")
def test_a_report_is_made(folder, compared, command):
    assert "index.html" in call(folder, "report", *words_of(command))


@of_command("attnbench doctor")
def test_the_doctor_runs_the_contract_on_the_example_mixer(folder, command):
    said = call(folder, "doctor", *words_of(command), "device=cpu")
    assert re.findall(r"^  (\S.*?) {2,}kept$", said, re.MULTILINE) == [promise.words for promise in PROMISES]


@of_command("attnbench bench --config-dir")
def test_the_example_bench_makes_its_tables(folder, command):
    said = call(folder, "bench", *words_of(command), "bench.channels=[8]", "device=cpu")
    assert re.search(r"channels +definition +torch", said), said
    assert "outputs/benchmark/norm/float32-" in said


@of_command("scripts/benchmark_peers.py")
def test_the_peers_are_explained(folder, command):
    assert "--nanogpt" in call(folder, "benchmark_peers.py", *words_of(command))


def test_the_python_of_the_pages_runs(folder, trained, monkeypatch, capsys):
    small = [*TRAINING, *smoke_words("perplexity")]
    plan = {"overrides": ["experiment=demo", *TRAINING[:-2], *smoke_words("copy")], "evaluations": ["copy"]}
    plan |= {"seeds": [0], "probe_seeds": [0], "device": "cpu", "logger": "none"}
    code = "\n".join(block for page in PYTHON for block in blocks(page, "python"))
    for shown, smaller in (
        ('plan="demo", only=["copy"]', 'plan="demo", **plan'),
        ('"experiment=demo"]', '"experiment=demo", *small]'),
    ):
        assert shown in code
        code = code.replace(shown, smaller)
    names = {"small": small, "plan": plan}
    monkeypatch.chdir(folder)
    exec(code, names)
    assert set(names["results"].scores["variant"]) == {"softmax", "mine"}
    assert "bits_per_character" in set(names["one"].rows["metric"])
    # A text of the letters that the run has read.
    assert len(re.sub(r"[^a-z ]", "", capsys.readouterr().out)) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "evaluations", "words", "figures"),
    [
        ("fading", ["perplexity", "copy"], smoke_words("perplexity", "copy"), {"copy-symbol_accuracy-length"}),
        # At one delay echo's scores stand in a table alone.
        ("linear", ["echo", "next_character"], FEW, {"next_character-accuracy-checkpoint"}),
    ],
)  # fmt: skip
def test_the_examples_go_through_compare_into_the_report(folder, variant, evaluations, words, figures):
    plan = {
        "overrides": ["experiment=demo", *TINY_RUN, "data.path=my_text.txt", *words],
        "variants": {variant: [f"attn={variant}"]},
        "evaluations": evaluations,
        **{"seeds": [0], "probe_seeds": [0], "learning_rates": [1e-3]},
    }
    (folder / "my_conf" / "plan" / f"of_{variant}.yaml").write_text(yaml.safe_dump(plan))
    call(folder, "compare", "--config-dir", "my_conf", f"plan=of_{variant}", "logger=none", "device=cpu")
    outputs = folder / "outputs" / f"of_{variant}"
    record = json.loads((outputs / "comparison.json").read_text())
    assert record["failures"] == []
    assert "--config-dir my_conf" in record["command"]
    assert {Path(name).name.split("-")[0] for name in record["files"]} == {"training", *evaluations}
    assert figures <= {path.stem for path in (outputs / "report" / "figures").glob("*.svg")}
    page = (outputs / "report" / "index.html").read_text()
    assert all(f"{name.capitalize().replace('_', ' ')}</h2>" in page for name in evaluations)


def test_the_example_mixer_takes_all_that_evaluations_put_around_every_mixer():
    """Hold that no setting stands beside its scores as one that it did not get."""
    settings = yaml.safe_load(files("docs/adding_a_mixer.md")["my_conf/attn/fading.yaml"])
    for probe in ("recall", "copy"):
        evaluation = compose_once([f"eval=[{probe}]"]).evaluations[0]
        for task in build(evaluation.target, evaluation.options, Probe).tasks():
            assert task.mixer_options
            assert task.mixer_options.keys() <= settings.keys()


def test_every_command_is_run_here_or_elsewhere():
    programs = (
        *(f"attnbench {name}" for name in ("train", "evaluate", "generate", "export", "compare", "runs", "report")),
        "attnbench doctor",
        "attnbench bench --config-dir",
        "scripts/benchmark_peers",
    )
    run = {line for line in commands() if any(program in line for program in programs)}
    # test_bench.py runs every yaml of conf/bench.
    run |= {line for line in commands() for name in BENCHES if f"attnbench bench bench={name}" in line}
    assert set(commands()) == run | set(ELSEWHERE)
