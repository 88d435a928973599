"""export.py: a folder that transformers loads without attnbench, with the same logits, text and tokens."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_mixers import settings_of
from pages import write_files
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from scripts_here import run_here
from small import MIXERS, TINY_RUN, compose_once, mixer_settings, python_path, rewrite_checkpoint
from torch import Tensor

from attnbench import load_checkpoint
from attnbench.cli.compose import compose
from attnbench.comparison.execute import run
from attnbench.data.bpe import train_bpe
from attnbench.data.tokenizer import Bytes
from attnbench.export.huggingface import export_run, in_torch, source_files
from attnbench.machine.precision import computing
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import Sampling, Writer
from attnbench.model.stored import tokenizer_of
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ExportSettings, MixerSettings, RunSettings

needs_transformers = pytest.mark.skipif(not util.find_spec("transformers"), reason="transformers is not installed")
HYBRID = "hybrid"
FAST = ("flash", "gated_deltanet")
TEXT = "the cat runs over a <green> tree\n\n\N{REPLACEMENT CHARACTER}é cat"
TOLERANCE = {"logits": 1e-5, "reloaded": 1e-5, "embedded": 1e-5, "after refusals": 1e-5, "pieces": 1e-4}
"""Pieces are rounded otherwise than the whole, in attnbench too."""
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text) -> Callable[[str], tuple[Path, RunSettings]]:
    outputs, done = tmp_path_factory.mktemp("trained"), {}

    def train(name: str) -> tuple[Path, RunSettings]:
        if name not in done:
            layers = []
            if name == HYBRID:
                layers = ["attn.layers=[gated_deltanet,window]", "model.norm=layer", "model.untied=true"]
            learnt = ["model.num_layers=2", "train.num_steps=20", "train.batch_size=4", "train.learning_rate=3e-2"]
            words = [f"attn={name}", *layers, *TINY_RUN, *learnt, "data.vocabulary_size=20", f"data.path={text}"]
            settings = compose_once([*words, f"outputs_dir={outputs}", "logger=none", "device=cpu", "eval=[]"])
            done[name] = run(settings), settings
        return done[name]

    return train


@pytest.fixture
def exported(trained, tmp_path) -> Export:
    """Export a small model to NAME/my model; that one folder has the name of all, and is no name of a module."""

    def export(name: str, **changed: Any) -> Path:
        folder, settings = trained(name)
        to = tmp_path / name / "my model"
        how = {"run": str(folder), "format": "huggingface", "checkpoint": "final", "to": str(to)}
        return export_run(ExportSettings(**{**how, "command": "attnbench export", **changed}), settings)

    return export


def prompt(length: int) -> Tensor:
    return torch.randint(0, 13, (2, length), generator=torch.Generator().manual_seed(length))


def looked_at(folders: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    for folder in folders:
        inputs = {"tokens": prompt(11).tolist(), "text": TEXT}
        (folder / "inputs.json").write_text(json.dumps(inputs))
    out.mkdir()
    environment = {**python_path(), "HF_HOME": str(out / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "exported.py"), str(out), *map(str, folders)]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{folder.parent.name}.json").read_text()) for folder in folders]


def expected_of(model: LanguageModel, num_writable: int, num_tokens: int) -> tuple[Tensor, list[list[int]]]:
    sampling = Sampling(batch_size=2, num_characters=num_writable)
    writer = Writer(model, sampling, batch_size=2, max_length=11 + num_tokens, dtype=torch.float32, captured=False)
    with torch.no_grad(), computing("float32", torch.device("cpu")):
        logits_BTC, _ = model(prompt(11))
        return logits_BTC, torch.stack(list(writer.write(prompt(11), num_tokens)), dim=1).tolist()


@needs_transformers
@pytest.mark.parametrize(
    "names",
    [
        FAST,
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for others in [[name for name in (*MIXERS, HYBRID) if name not in FAST]]
            for names in (tuple(others[start::2]) for start in range(2))
        ),
    ],
    ids=["some", "every other", "the others"],
)
def test_it_computes_and_writes_the_same_where_attnbench_is_not(trained, exported, tmp_path, names):
    folders, tokens = [exported(name) for name in names], set()
    for name, found in zip(names, looked_at(folders, tmp_path / "out"), strict=True):
        model, record = load_checkpoint(trained(name)[0] / "checkpoint" / "final", device="cpu", precision="float32")
        logits_BTC, written = expected_of(model, len(record.vocabulary) - 1, len(found["written"][0]))
        for form, tolerance in TOLERANCE.items():
            difference = (torch.tensor(found[form]) - logits_BTC).abs().max().item()
            print(f"{name}: {form} differ by at most {difference:.1e} of {logits_BTC.abs().max():.1f}")
            assert difference <= tolerance, (name, form)
        assert (torch.tensor(found["last"]) - logits_BTC[:, [2, -1]]).abs().max() <= TOLERANCE["logits"], name
        assert found["written"] == written, name
        assert found["without_state"] == [line[: len(found["without_state"][0])] for line in written], name
        assert found["beams"] == found["beams_without_state"], name
        tokens |= {token for line in written for token in line}
        ids = tokenizer_of(record).encode(TEXT).tolist()
        assert found["token_ids"] == found["ids_again"] == ids
        assert found["text"] == tokenizer_of(record).decode(ids)
        assert found["untrained"] == []
        assert found["modules"] == ["torch", "transformers_modules"]
        assert found["special"] == 3 * [len(record.vocabulary) - 1]
        refused = found["refused"]
        assert "attention_mask: has zeros, but the model reads no padding" in refused["padding"]
        assert refused["padding behind a state"] == refused["padding"]
        assert "past_key_values: is a DynamicCache" in refused["cache"]
        assert "output_hidden_states=True" in refused["hidden states"]
        assert "give one of the two" in refused["both"]
        assert f"the model has the {record.vocabulary_size} symbols of its training" in refused["resize"]
        assert "Norm: no weights for weight; from_pretrained loads a whole model" in refused["missing"]
    # Not all of them write the same symbol again and again.
    assert len(tokens) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run={run}", "format=onnx"], "format=onnx: must be one of huggingface"),
        (["run={folder}"], "config.yaml cannot be read (No such file or directory); give the folder of a run"),
        (["run={unfinished}"], "has no finished training; the attnbench train command that made it resumes it"),
        (["run={run}", "to={run}"], "exists and is not an empty folder; remove it or name another"),
        (["run={run}", "to={run}/config.yaml"], "exists and is not an empty folder"),
        (["run={run}", "to={run}/config.yaml/there"], "config.yaml: File exists"),
        (["run={run}", "checkpoint=last"], "checkpoint=last: must be one of final, best"),
        (["run={run}", "attn=linear"], "attn=linear: unknown setting"),
    ],
)
def test_a_mistake_is_one_line(trained, tmp_path, words, message):
    run_folder, _ = trained("flash")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_bytes((run_folder / "config.yaml").read_bytes())
    places = {"run": run_folder, "folder": tmp_path, "unfinished": unfinished}
    code, _, errors = run_here("export.py", *(word.format(**places) for word in words), cwd=tmp_path)
    assert code
    assert message in errors
    assert len(errors.splitlines()) == 1, errors


def test_the_command_makes_a_folder_in_the_run_s_and_not_twice(trained):
    folder, _ = trained("flash")
    code, _, errors = run_here("export.py", f"run={folder}", "checkpoint=best")
    assert not code, errors
    made = folder / "huggingface"
    card = (made / "README.md").read_text()
    assert f"attnbench export run={folder.name} checkpoint=best" in card
    assert "| mixer | flash, as Softmax, 2 layers |" in card
    assert (made / "LICENSE").read_text().startswith("MIT License")
    assert (made / "results.csv").read_text().count("\n") > 3
    weights = load_file(made / "model.safetensors")
    best = next((folder / "checkpoint").glob("best-*"))
    assert {name.removeprefix("model."): x.tolist() for name, x in weights.items()} == {
        name: x.tolist() for name, x in load_file(best / "weights.safetensors").items()
    }
    code, _, errors = run_here("export.py", f"run={folder}")
    assert code
    assert "exists and is not an empty folder" in errors
    assert not [path for path in folder.iterdir() if path.name.startswith(".huggingface")]


def test_on_a_full_disk_nothing_is_left(exported, tmp_path, monkeypatch):
    def full(*_, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("attnbench.export.huggingface.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        exported("flash")
    assert not [*(tmp_path / "flash").iterdir()]
    monkeypatch.undo()
    made = exported("flash")
    assert len({path.stat().st_mode for path in made.iterdir()}) == 1
    beside = made.parent / "made by mkdir"
    beside.mkdir()
    assert made.stat().st_mode == beside.stat().st_mode
    assert {path.name for path in made.parent.iterdir()} == {made.name, beside.name}


def test_of_two_exports_to_one_folder_one_is_there_as_a_whole(exported, tmp_path, monkeypatch):
    mine = tmp_path / "flash" / ".my model.partial"
    mine.mkdir(parents=True)
    (mine / "notes").write_text("a user's")
    others = []

    def during_another(tensors, path, metadata):
        monkeypatch.undo()
        others.append({path.name: path.read_bytes() for path in exported("flash", checkpoint="best").iterdir()})
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr("attnbench.export.huggingface.save_file", during_another)
    with pytest.raises(UserError, match="my model: exists and is not an empty folder"):
        exported("flash")
    made = tmp_path / "flash" / "my model"
    assert others == [{path.name: path.read_bytes() for path in made.iterdir()}]
    assert {path.name for path in made.parent.iterdir()} == {made.name, mine.name}
    assert (mine / "notes").read_text() == "a user's"


def test_weights_that_are_not_finite_are_refused_by_name(trained, tmp_path):
    folder, _ = trained("flash")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = load_file(damaged / "checkpoint" / "final" / "weights.safetensors")
    weights["blocks.1.mixer_norm.weight"][3] = torch.nan
    rewrite_checkpoint(damaged / "checkpoint" / "final", "weights.safetensors", save(weights))
    code, _, errors = run_here("export.py", f"run={damaged}", f"to={tmp_path / 'made'}")
    assert code == 1
    assert "its weights blocks.1.mixer_norm.weight are not all finite" in errors
    assert len(errors.splitlines()) == 1, errors
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (
            MixerSettings(name="fla", target="attnbench.mixers.fla_layer.FlaLayer", options={"layer": "GatedDeltaNet"}),
            "attn=fla: contains fla.layers.GatedDeltaNet, a layer of another library, which is not exported",
        ),
        (
            MixerSettings(name="module", target="attnbench.mixers.module.Module", options={"path": "mine:Layer"}),
            "attn=module: contains mine.Layer, a layer of another library, which is not exported",
        ),
    ],
)
def test_an_adapter_is_refused_by_name(trained, tmp_path, mixer, message):
    folder, settings = trained("flash")
    wanted = ExportSettings(
        run=str(folder), format="huggingface", checkpoint="final", to=str(tmp_path / "made"), command=""
    )
    with pytest.raises(UserError, match=message):
        export_run(wanted, replace(settings, mixer=mixer))
    assert not [*tmp_path.iterdir()]


def test_a_kernel_s_window_has_no_form_in_torch():
    flash = mixer_settings("flash")
    windowed = replace(flash, options={**flash.options, "window": 8, "backend": "triton"})
    assert in_torch(flash).target == "attnbench.mixers.softmax.Softmax"
    with pytest.raises(UserError, match=r"attn=flash: Flash with these options has sdpa, .* no form in torch alone"):
        in_torch(windowed)


def test_a_mixer_from_outside_leaves_with_what_lies_beside_it(tmp_path):
    mixer = settings_of("SeparateProjections")["mixer"]
    files = source_files([replace(mixer, options={"backend": "torch"})])
    assert "class SeparateProjections(Mixer):" in files["outside_mixers.py"]
    assert "from .mixers_base import Mixer, head_count" in files["outside_mixers.py"]
    assert "LosesTheTail" not in "".join(files.values())
    assert '"SeparateProjections": SeparateProjections' in files["mixers_attnbench.py"]


@needs_transformers
@pytest.mark.slow
def test_the_mixer_that_the_page_adds_leaves_too(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "docs/adding_a_mixer.md")
    monkeypatch.syspath_prepend(tmp_path)
    small = [*TINY_RUN, f"data.path={text}", "logger=none", "device=cpu", "eval=[]"]
    settings = compose(["attn=fading", *small], config_dir="my_conf")
    folder = run(settings)
    how = {"format": "huggingface", "checkpoint": "final", "to": str(tmp_path / "made"), "command": ""}
    made = export_run(ExportSettings(run=str(folder), **how), settings)
    model, record = load_checkpoint(folder / "checkpoint" / "final", device="cpu")
    (found,) = looked_at([made], tmp_path / "out")
    logits_BTC, written = expected_of(model, len(record.vocabulary) - 1, len(found["written"][0]))
    assert (torch.tensor(found["reloaded"]) - logits_BTC).abs().max() <= TOLERANCE["reloaded"]
    assert found["written"] == written


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_model_of_other_tokens_leaves_too(tmp_path, text, kind):
    words = ["attn=flash", *TINY_RUN, "data.vocabulary_size=300", f"data.path={text}", f"outputs_dir={tmp_path}"]
    settings = compose_once([*words, "logger=none", "device=cpu", "eval=[]"])
    folder = run(settings)
    # Its embedding has room for other tokens than those that it was trained on.
    tokenizer = Bytes() if kind == "bytes" else train_bpe([text.read_bytes()], 270)
    final = folder / "checkpoint" / "final"
    content = json.loads((final / "config.json").read_text()) | {"vocabulary": [], "tokenizer": tokenizer.state()}
    rewrite_checkpoint(final, "config.json", json.dumps(content).encode())
    how = {"format": "huggingface", "checkpoint": "final", "to": str(tmp_path / "made"), "command": ""}
    made = export_run(ExportSettings(run=str(folder), **how), settings)
    (found,) = looked_at([made], tmp_path / "out")
    model, _ = load_checkpoint(final, device="cpu")
    logits_BTC, written = expected_of(model, tokenizer.num_writable, len(found["written"][0]))
    assert (torch.tensor(found["reloaded"]) - logits_BTC).abs().max() <= TOLERANCE["reloaded"]
    assert found["written"] == written
    assert found["token_ids"] == found["ids_again"] == tokenizer.encode(TEXT).tolist()
    assert found["text"] == TEXT
