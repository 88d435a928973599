"""evaluate.py: what was trained before is evaluated where it lies now, and only what is not there yet is measured."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from probe_settings import smoke_words
from runs import SMALL, write_text

from attnbench.cli.compose import compose
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_evaluation
from attnbench.comparison import execute as run_model
from attnbench.evals import perplexity
from attnbench.model import stored
from attnbench.report.terminal import print_summary
from attnbench.results.row_files import read_results
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.training import job as training_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run without any evaluation; tests copy it."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder / "small.txt", 0)
    words = [*SMALL, "data=text", "eval=[]", f"data.path={folder / 'small.txt'}", f"outputs_dir={folder / 'outputs'}"]
    return run_model.run(compose(words))


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A copy of the run, in an experiment of the same name."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "demo" / trained.name))


def evaluate(monkeypatch, folder: Path, *overrides: str, names: tuple[str, ...] = ("perplexity",)) -> object:
    """The exit code of `scripts/evaluate.py run=...`, None for 0."""
    words = [f"run={folder}", f"eval=[{','.join(names)}]", *smoke_words(*names), "device=cpu", *overrides]
    # The launch sets it, for Hydra; taken back afterwards.
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr("sys.argv", ["scripts/evaluate.py", *words])
    try:
        launch(run_model.evaluate_again, "evaluate", print_summary, read_evaluation)
    except SystemExit as ending:
        return ending.code
    return None


def evaluations(folder: Path) -> set[str]:
    return {row.identity.evaluation for row in read_folders([folder])}


def test_what_is_not_there_yet_is_measured_and_nothing_is_trained(folder, monkeypatch, capsys):
    assert evaluations(folder) == {"training"}
    monkeypatch.setattr(training_job.Run, "rows", None)
    assert evaluate(monkeypatch, folder, names=("perplexity", "recall")) is None
    assert evaluations(folder) == {"training", "perplexity", "recall"}
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "recall" in shown
    [cell] = (folder.parent / "cells").iterdir()
    assert (folder / "cells.txt").read_text() == f"cells/{cell.name}\n"


def test_what_is_there_is_measured_again_only_with_rerun(folder, monkeypatch):
    evaluate(monkeypatch, folder, names=("perplexity", "recall"))

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.parent.rglob("results/*.jsonl")}

    before = times()
    assert evaluate(monkeypatch, folder, names=("perplexity", "recall")) is None
    assert times() == before
    assert evaluate(monkeypatch, folder, "rerun=true", names=("perplexity", "recall")) is None
    after = times()
    assert {path.name.split("-")[0] for path, time in after.items() if time > before[path]} == {"perplexity", "recall"}


def test_it_is_the_evaluation_that_train_makes(folder, trained, monkeypatch, tmp_path):
    evaluate(monkeypatch, folder)
    text = trained.parents[2] / "small.txt"
    words = [*SMALL, "data=text", f"data.path={text}", "eval=[perplexity]", *smoke_words("perplexity")]
    by_train = run_model.run(compose([*words, f"outputs_dir={tmp_path}/b"]))
    [own], [other] = (list(place.glob("results/perplexity-*.jsonl")) for place in (folder, by_train))
    assert own.name == other.name
    assert [row.measurement for row in read_results(own)] == [row.measurement for row in read_results(other)]


def test_a_folder_that_was_moved_keeps_its_cells_beside_it(trained, tmp_path, monkeypatch):
    moved = Path(shutil.copytree(trained, tmp_path / "elsewhere" / "my run"))
    assert evaluate(monkeypatch, moved, names=("perplexity", "recall")) is None
    assert evaluations(moved) == {"training", "perplexity", "recall"}
    assert [path.name.split("-")[0] for path in (tmp_path / "elsewhere" / "cells").iterdir()] == ["recall"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"]


def test_the_folder_may_be_the_current_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert evaluate(monkeypatch, Path(), names=("recall",)) is None
    assert (folder.parent / "cells").is_dir()


def test_other_settings_of_an_evaluation_are_rows_of_their_own(folder, monkeypatch, capsys):
    names = ("perplexity", "recall")
    evaluate(monkeypatch, folder, names=names)
    others = ("eval.perplexity.extrapolation=[2,4]", "eval.recall.num_steps=11")
    assert evaluate(monkeypatch, folder, *others, names=names) is None
    assert len(list(folder.glob("results/perplexity-*.jsonl"))) == 2
    assert len(list(folder.parent.glob("cells/recall-*"))) == 2
    # The terminal shows what was measured last.
    assert len((folder / "cells.txt").read_text().splitlines()) == 1
    assert "perplexity" in capsys.readouterr().out


def with_resolved(name: str, value: str) -> Callable[[str], str]:
    """What makes this of an entry of what a run's settings were resolved to."""

    def alter(text: str) -> str:
        given, _, resolved = text.partition("\nresolved:")
        return given + "\nresolved:" + re.sub(rf"(?m)^  {name}: .*", f"  {name}: {value}", resolved)

    return alter


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda text: text.replace("seq_len: 32", "seq_len: many"), "seq_len"),
        (lambda text: text.replace("seq_len: 32", "seq_len: 64"), "was it altered?"),
        (lambda text: text.replace("dim: 32", "dim: 64"), "was it altered?"),
        (lambda text: text.replace("rotary_theta", "theta"), "theta"),
        (lambda text: text.replace("attnbench.mixers.softmax.Softmax", "os.system"), "os.system"),
        (lambda text: text.partition("resolved")[0], "not the config of a run (it is empty or cut off"),
        *(
            (with_resolved(name, value), f"does not say what was trained (resolved.{name}=")
            for name, value in (
                *(("backend", "[torch]"), ("backend", "{a: b}"), ("precision", "null"), ("precision", "3")),
                *(("compile", "[]"), ("compile", "maybe"), ("device", "3"), ("device", "[cpu]")),
                *(("config_hash", "1"), ("corpus", "{}")),
            )
        ),
        (with_resolved("device", "warp"), "does not say what was trained"),
        (with_resolved("device", "'cpu:x'"), "does not say what was trained"),
        (with_resolved("backend", "2001-01-01"), "not the config of a run"),
        (with_resolved("config_hash", "!!binary aGk="), "not the config of a run"),
        (lambda text: re.sub("(?ms)^resolved:.*", "resolved: 3\n", text), "does not say what was trained"),
        (lambda text: text.replace("seed: 0", "seed: 2001-01-01"), "not the config of a run"),
        (lambda text: "x: [", "not the config of a run"),
        (lambda text: "", "not the config of a run (it is empty or cut off"),
    ],
)
def test_an_altered_config_is_an_error(alter, message, folder, monkeypatch, capsys):
    path = folder / "config.yaml"
    altered = alter(path.read_text())
    assert altered != path.read_text()
    path.write_text(altered)
    assert evaluate(monkeypatch, folder) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(folder.glob("results/perplexity-*"))


def test_another_corpus_is_an_error(folder, monkeypatch, capsys, tmp_path):
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    write_text(tmp_path / "other.txt", 1)
    content["data"]["path"] = str(tmp_path / "other.txt")
    path.write_text(yaml.safe_dump(content))
    assert evaluate(monkeypatch, folder) == 1
    assert "was trained on text:small@" in capsys.readouterr().err


def test_a_folder_without_a_finished_training_is_an_error(folder, monkeypatch, capsys, tmp_path):
    assert evaluate(monkeypatch, tmp_path) == 1
    assert "config.yaml cannot be read" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoint")
    assert evaluate(monkeypatch, folder) == 1
    assert "has no finished training" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_evaluated(folder, monkeypatch):
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "match_by: feed_forward\n")
    assert evaluate(monkeypatch, folder) is None


def test_a_checkpoint_that_is_removed_meanwhile_is_one_line_and_results_stay(folder, monkeypatch, capsys):
    assert evaluate(monkeypatch, folder) is None
    before = {path: path.read_bytes() for path in folder.glob("results/*")}
    reopen = run_model.reopen

    def removed_since(*given):
        opened = reopen(*given)
        shutil.rmtree(folder / "checkpoint")
        return opened

    monkeypatch.setattr(run_model, "reopen", removed_since)
    capsys.readouterr()
    assert evaluate(monkeypatch, folder, "rerun=true") == 1
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "Traceback"))]
    assert f"{folder / 'checkpoint' / 'final'}: was removed before perplexity could read it" in error
    assert {path: path.read_bytes() for path in folder.glob("results/*")} == before


def test_a_checkpoint_that_goes_while_it_is_read_is_named(folder, monkeypatch):
    final = folder / "checkpoint" / "final"
    for name, read in (("load_file", stored.load_file), ("_record", stored._record)):
        with monkeypatch.context() as patch:

            def then_gone(path, read=read):
                shutil.rmtree(final)
                return read(path)

            kept = Path(shutil.copytree(final, folder / "kept"))
            patch.setattr(stored, name, then_gone)
            with pytest.raises(UserError, match=f"^{re.escape(str(final))}: is not there, or was removed while"):
                stored.load_model(final)
            kept.rename(final)


@pytest.mark.parametrize("multiple", [1, 2])
def test_memory_that_runs_out_is_rows_and_the_rest_is_measured(multiple, folder, monkeypatch):
    def full(model, batches, precision, measure=perplexity.character_nats):
        batches = list(batches)
        if batches[0][0].shape[1] == 32 * multiple:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 8 GiB. See https://a.b"
            )
        return measure(model, batches, precision)

    monkeypatch.setattr(perplexity, "character_nats", full)
    assert evaluate(monkeypatch, folder) is None
    found = [row.measurement for row in read_folders([folder]) if row.identity.evaluation == "perplexity"]
    lost = [row for row in found if row.status == "out_of_memory"]
    assert {row.reason for row in lost} == {"CUDA out of memory. Tried to allocate 9 GiB"}
    assert {row.settings["sequence_length"] for row in lost} == {32 * multiple}
    # At the training length nothing comes before it; beyond, what is compared stands.
    assert any(row.status == "ok" and row.settings["split"] == "test" for row in found) == (multiple == 2)


def test_the_device_is_that_of_the_command(folder, monkeypatch, capsys):
    assert evaluate(monkeypatch, folder, "device=cuda:99") == 1
    assert "device=cuda:99" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["+seed=1", "+attn=softmax", "device=3", "eval.perplexity=3"])
def test_what_is_no_setting_of_it_is_an_error(override, folder, monkeypatch, capsys):
    assert evaluate(monkeypatch, folder, override) in (1, 2)
    assert override.split("=")[0].strip("+") in capsys.readouterr().err


def test_the_trained_weights_are_what_is_evaluated(folder, monkeypatch, capsys):
    (folder / "checkpoint" / "final" / "weights.safetensors").write_bytes(b"torn")
    assert evaluate(monkeypatch, folder) == 1
    assert "altered or torn" in capsys.readouterr().err


@pytest.mark.parametrize(("outputs", "given"), [("outputs", False), ("/nowhere", True)])
def test_a_text_is_found_from_another_folder_or_named_again(outputs, given, folder, trained, tmp_path, monkeypatch):
    text = shutil.copy(trained.parents[2] / "small.txt", tmp_path / "small.txt")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["outputs_dir"], config["data"]["path"] = outputs, "small.txt"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert evaluate(monkeypatch, folder, *([f"data.path={text}"] if given else [])) is None
    assert evaluations(folder) == {"training", "perplexity"}
