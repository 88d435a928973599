"""Checkpoints: what comes back is what was kept, to the bit, or an error that names the file."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import (
    MODEL,
    TRAIN,
    assert_equal_numbers,
    batch_of,
    fresh_state,
    numbers_of,
    record,
    rewrite_checkpoint,
    small_model,
)
from torch import Tensor

from attnbench.machine.signals import StopRequest
from attnbench.model import stored
from attnbench.model.stored import load_model, load_record
from attnbench.settings.earlier import current_mixer
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import MixerSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState, best_folder, is_final, load_last, save_best, save_final, save_step
from attnbench.training.hooks import Sitting, Stopwatch
from attnbench.training.log import MetricsLog
from attnbench.training.loop import train

NUM_STEPS = 12
STORED = Path(__file__).parents[1] / "stored"
"""Checkpoints as each format wrote them, by `save_step` after three steps of training; never written again."""


def trained(name: str = "softmax", num_steps: int = 3) -> TrainState:
    state = fresh_state(name)
    train(state, batch_of, TRAIN, precision="float32", num_steps=num_steps, hooks=[])
    return state


def saved_at(folder: Path, *steps: int) -> TrainState:
    """One state, kept under several steps."""
    state = trained()
    for step in steps:
        state.step = step
        save_step(folder, state, record())
    return state


def rewrite_config(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    rewrite_checkpoint(folder, "config.json", json.dumps({**content, **changes}).encode())


def rewrite_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "other")
    content = (folder / "other").read_bytes()
    (folder / "other").unlink()
    rewrite_checkpoint(folder, "weights.safetensors", content)


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    state = trained(name)
    state.seconds = 1.0 / 3
    state.best_step, state.best_nats = 2, 2.0 / 3
    save_step(tmp_path, state, record(name))
    # Another seed, so that nothing can be right by chance.
    loaded = load_last(tmp_path, small_model(name, seed=9))
    assert loaded is not None
    assert_equal_numbers(numbers_of(loaded), numbers_of(state))
    assert loaded.counters() == state.counters()
    model, kept = load_model(tmp_path / "step-00000003")
    assert kept == record(name)
    logits_BTC, expected_BTC = (each(batch_of(0).tokens_BT)[0] for each in (model, state.model))
    assert torch.equal(logits_BTC, expected_BTC)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_weights_may_be_read_by_those_who_may_read_the_other_files(umask, tmp_path):
    before = os.umask(umask)
    try:
        saved_at(tmp_path, 4)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "step-00000004").iterdir()}
    assert modes == dict.fromkeys(FILES, 0o666 & ~umask)


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path):
    assert load_last(tmp_path, small_model()) is None
    assert load_last(tmp_path / "none", small_model()) is None
    with pytest.raises(UserError, match=r"no best-\* checkpoint"):
        best_folder(tmp_path)
    assert not is_final(tmp_path)


def test_the_last_two_states_are_kept(tmp_path):
    saved_at(tmp_path, 1, 9, 10, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    loaded = load_last(tmp_path, small_model())
    assert loaded is not None
    assert loaded.step == 100


def sitting_of(folder: Path, state: TrainState, stop: StopRequest, name: str = "softmax", **job: Any) -> Sitting:
    train = replace(TRAIN, checkpoint_interval_seconds=3600)
    job |= {"folder": folder, "train": train, "num_steps": NUM_STEPS, "tokens_per_step": 1, "checkpoint_interval": 4}
    return Sitting(
        job=SimpleNamespace(**job, record=lambda: record(name)),  # pyright: ignore[reportArgumentType]
        log=MetricsLog(folder / "metrics.jsonl", None),
        mirror=None,
        bar=Mock(),
        stopwatch=Stopwatch(state, torch.device("cpu")),
        stop=stop,
    )


def test_the_best_weights_are_those_of_the_lowest_validation_loss(tmp_path):
    state, losses = trained(), iter([3.0, 2.0, 2.5])
    job = {"measure": lambda state: {"nats_per_character": next(losses)}, "is_due": lambda _: True}
    sitting = sitting_of(tmp_path, state, StopRequest(), **job, new_end=lambda *_: None)
    for state.step in (1, 2, 3):
        sitting.validate(state)
    assert (state.best_nats, state.best_step) == (2.0, 2)
    assert best_folder(sitting.folder).name == "best-00000002"


def test_the_end_leaves_the_best_and_the_final_weights(tmp_path):
    state = trained()
    for step in (1, 2, 3):
        state.step, state.best_step = step, min(step, 2)
        save_step(tmp_path, state, record())
        if step < 3:
            save_best(tmp_path, state, record())
            weights_of_best = {name: tensor.detach().clone() for name, tensor in state.model.named_parameters()}
            with torch.no_grad():
                state.model.embedding.weight.add_(1.0)
    assert not is_final(tmp_path)
    save_final(tmp_path, state, record())
    assert is_final(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-00000002", "final"]
    for folder in tmp_path.iterdir():
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["config.json", "state.json", "weights.safetensors"]
    best, _ = load_model(best_folder(tmp_path))
    final, _ = load_model(tmp_path / "final")
    for name, tensor in state.model.named_parameters():
        assert torch.equal(dict(best.named_parameters())[name], weights_of_best[name])
        assert torch.equal(dict(final.named_parameters())[name], tensor)


def test_only_names_of_our_own_form_are_read_renamed_or_removed(tmp_path):
    state = saved_at(tmp_path, 4, 8)
    shutil.copytree(tmp_path / "step-00000008", tmp_path / "step-00000032.bak")
    shutil.copytree(tmp_path / "step-00000008", tmp_path / "step-8")
    for name in ("step-notes.txt", "best-notes.txt", ".notes.partial", ".best-notes.removed"):
        (tmp_path / name).write_text("mine")
    own = {path.name: path.stat().st_ino for path in tmp_path.iterdir()} | {"step-00000004": 0, "step-00000008": 0}
    (tmp_path / ".step-00000002.partial").mkdir()
    loaded = load_last(tmp_path, small_model())
    assert loaded is not None
    assert loaded.step == 8
    with pytest.raises(UserError, match=r"no best-\* checkpoint"):
        best_folder(tmp_path)
    for step in (12, 16):
        state.step = state.best_step = step
        save_best(tmp_path, state, record())
        save_step(tmp_path, state, record())
    assert best_folder(tmp_path).name == "best-00000016"
    save_final(tmp_path, state, record())
    checkpoint.remove_all(tmp_path)
    left = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert left == {name: number for name, number in own.items() if number}


def test_a_file_of_the_user_s_in_a_checkpoint_outlives_it(tmp_path):
    state = saved_at(tmp_path, 4)
    (tmp_path / "step-00000004" / "notes.txt").write_text("mine")
    for step in (8, 12, 16):
        state.step = state.best_step = step
        save_step(tmp_path, state, record())
    save_final(tmp_path, state, record())
    assert {path.name for path in tmp_path.iterdir()} == {".step-00000004.removed", "final"}
    assert [path.name for path in (tmp_path / ".step-00000004.removed").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_run_stopped_at_any_step_resumes_to_the_same_bits(name, tmp_path):
    never_stopped = numbers_of(trained(name, NUM_STEPS))
    assert_equal_numbers(numbers_of(trained(name, NUM_STEPS)), never_stopped)
    # Between, at and behind validations, and just before the end.
    for stop_step in (1, 4, 6, NUM_STEPS - 1):
        folder, stop, state = tmp_path / str(stop_step), StopRequest(), fresh_state(name)

        def ask(state: TrainState, report: object, stop: StopRequest = stop, at: int = stop_step) -> None:
            stop.signal = 15 if state.step == at else None

        sitting = sitting_of(folder, state, stop, name)
        with pytest.raises(Interrupted, match=f"stopped at step {stop_step} of 12") as caught:
            train(state, batch_of, TRAIN, precision="float32", num_steps=NUM_STEPS, hooks=[ask, sitting.keep])
        assert caught.value.exit_code == 143
        resumed = load_last(sitting.folder, small_model(name, seed=9))
        assert resumed is not None
        assert resumed.step == stop_step
        train(resumed, batch_of, TRAIN, precision="float32", num_steps=NUM_STEPS, hooks=[])
        assert_equal_numbers(numbers_of(resumed), never_stopped)
        assert {float(count) for count in resumed.update_count.values()} == {12.0}


def test_a_state_is_kept_at_every_validation_but_not_at_the_end(tmp_path):
    state = fresh_state()
    sitting, kept = sitting_of(tmp_path, state, StopRequest()), []

    def look(state: TrainState, report: object) -> None:
        kept.append(sorted(path.name for path in sitting.folder.glob("*")))

    train(state, batch_of, TRAIN, precision="float32", num_steps=NUM_STEPS, hooks=[sitting.keep, look])
    four, eight = "step-00000004", "step-00000008"
    assert kept == [*[[]] * 3, *[[four]] * 4, *[[four, eight]] * 5]


FILES = ["config.json", "weights.safetensors", "optimizer.safetensors", "state.json"]


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "without its last byte": content[:-1],
        "empty": b"",
        "one bit in the middle": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"x",
    }[how]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "how",
    ["missing", "without its last byte", "empty", "one bit in the middle", "longer"],
)
def test_a_damaged_file_is_named_and_the_older_state_still_loads(file, how, tmp_path):
    state = saved_at(tmp_path, 4, 8)
    path = tmp_path / "step-00000008" / file
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged(path.read_bytes(), how))
    model = small_model(seed=9)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with pytest.raises(UserError) as caught:
        load_last(tmp_path, model)
    message = str(caught.value)
    # A changed checksum of another file is seen there.
    assert str(path.parent) in message
    assert f"delete {path.parent} to resume from step-00000004" in message
    assert "\n" not in message
    assert_equal_numbers(dict(model.named_parameters()), before)
    with pytest.raises(UserError, match=file):
        load_model(path.parent)

    shutil.rmtree(path.parent)
    older = load_last(tmp_path, model)
    assert older is not None
    state.step = 4
    assert older.counters() == state.counters()
    assert_equal_numbers(numbers_of(older), numbers_of(state))


def test_a_lone_damaged_state_says_that_the_run_must_start_again(tmp_path):
    folder = tmp_path / "checkpoint"
    saved_at(folder, 4)
    (folder / "step-00000004" / "weights.safetensors").unlink()
    words = rf"weights\.safetensors: missing.*; delete {tmp_path}, and the same command trains from the start$"
    with pytest.raises(UserError, match=words):
        load_last(folder, small_model())


def test_another_format_is_refused_by_its_number(tmp_path):
    saved_at(tmp_path, 4)
    path = tmp_path / "step-00000004" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UserError, match=r"state\.json: format 99, this attnbench reads format 1"):
        load_model(path.parent)


@pytest.mark.parametrize("change", ["unknown", "absent", "of another shape"])
def test_tensors_that_the_model_does_not_have_are_refused(change, tmp_path):
    saved_at(tmp_path, 4)
    folder = tmp_path / "step-00000004"
    weights = load_file(folder / "weights.safetensors")
    if change == "unknown":
        weights["blocks.7.extra"] = torch.zeros(2)
    elif change == "absent":
        del weights["norm.weight"]
    else:
        weights["norm.weight"] = torch.zeros(MODEL.dim + 1)
    rewrite_weights(folder, weights)
    for load in (lambda: load_model(folder), lambda: load_last(tmp_path, small_model())):
        with pytest.raises(UserError, match="step-00000004: its tensors are not those of the model"):
            load()


def mixers_of(target: str, **options: object) -> list[dict]:
    entry = {"name": "softmax", "target": target, "options": {"backend": "torch", **options}}
    return [entry, entry]


def test_a_class_of_ones_own_is_built_where_the_caller_trusts_it(tmp_path, monkeypatch):
    (tmp_path / "mixers_of_mine.py").write_text(
        "from attnbench.mixers.softmax import Softmax\n\n\nclass Mine(Softmax):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    state = saved_at(tmp_path, 4)
    folder = tmp_path / "step-00000004"
    rewrite_config(folder, mixers=mixers_of("mixers_of_mine.Mine"), trusted=["mixers_of_mine.Mine"])
    with pytest.raises(UserError, match=r"config\.json.*trusted"):
        load_model(folder)
    content = json.loads((folder / "config.json").read_text())
    del content["trusted"]
    rewrite_checkpoint(folder, "config.json", json.dumps(content).encode())
    with pytest.raises(UserError, match=r"_target_=mixers_of_mine\.Mine"):
        load_model(folder)
    trust(["mixers_of_mine.Mine"])
    model, _ = load_model(folder)
    assert type(model.layers[0].mixer).__name__ == "Mine"
    assert torch.equal(model.embedding.weight, state.model.embedding.weight)


RECORDS = {
    "an unknown option of the mixer": {"mixers": mixers_of("attnbench.mixers.softmax.Softmax", foo=1)},
    "an option of a wrong type": {"mixers": mixers_of("attnbench.mixers.softmax.Softmax", conv_size="wide")},
    "an unknown entry": {"foo": 1},
    "an entry of a wrong type": {"seq_len": "long"},
    "a model of another shape": {"model": {"name": "m", "dim": 32}},
    "an impossible model": {
        "model": {"name": "m", "dim": 32, "num_layers": 2, "head_width": 0, "feed_forward_width": 24}
    },
    "mixers that are no list": {"mixers": 3},
    "fewer mixers than layers": {"mixers": mixers_of("attnbench.mixers.softmax.Softmax")[:1]},
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_describes_no_model_is_an_error_of_one_line(what, tmp_path):
    saved_at(tmp_path, 4)
    rewrite_config(tmp_path / "step-00000004", **RECORDS[what])
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "step-00000004")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "step-00000004" / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff"])
def test_a_record_that_is_no_json_object_is_named(content, tmp_path):
    saved_at(tmp_path, 4)
    rewrite_checkpoint(tmp_path / "step-00000004", "config.json", content)
    with pytest.raises(UserError, match=r"config\.json: not a record of a model"):
        load_model(tmp_path / "step-00000004")


@pytest.mark.parametrize("file", ["config.json", "weights.safetensors"])
def test_a_file_without_a_checksum_is_not_read(file, tmp_path):
    saved_at(tmp_path, 4)
    path = tmp_path / "step-00000004" / "state.json"
    content = json.loads(path.read_text())
    del content["sha256"][file]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{file}: .*checksum"):
        load_model(path.parent)


@pytest.mark.parametrize("dies_in", ["save_file", "_sha256", "sync"])
def test_a_write_that_was_cut_off_is_passed_over_and_swept_up(dies_in, tmp_path, monkeypatch):
    state = saved_at(tmp_path, 4)

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    state.step = 8
    with monkeypatch.context() as patch:
        patch.setattr(stored, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, state, record())
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", ".step-00000008.partial"}
    resumed = load_last(tmp_path, small_model())
    assert resumed is not None
    assert resumed.step == 4
    # The resumed run keeps its states at other steps, as one by the clock does.
    resumed.step = 7
    save_step(tmp_path, resumed, record())
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000007"}


def test_names_of_symbols_do_not_depend_on_the_locale(tmp_path, monkeypatch):
    # What open() takes for a text file in a Latin-1 locale, which has no replacement character.
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
    saved_at(tmp_path, 4)
    _, kept = load_model(tmp_path / "step-00000004")
    assert kept == record()


@pytest.mark.parametrize("folder", sorted(STORED.glob("checkpoint-format-*/*")), ids=lambda path: path.name)
def test_a_stored_checkpoint_of_every_format_still_gives_its_logits(folder, tmp_path):
    known = json.loads((folder / "logits.json").read_text())
    model, kept = load_model(folder / "step-00000003")
    logits_BTC, _ = model(torch.tensor(known["tokens_BT"]))
    torch.testing.assert_close(logits_BTC, torch.tensor(known["logits_BTC"]), atol=1e-5, rtol=1e-4)
    assert kept.vocabulary_size == len(kept.vocabulary) == logits_BTC.shape[-1]
    with torch.no_grad():
        model.embedding.weight.zero_()
    state = load_last(folder, model)
    assert state is not None
    assert state.step == 3
    assert {float(count) for count in state.update_count.values()} == {3.0}
    assert torch.equal(model(torch.tensor(known["tokens_BT"]))[0], logits_BTC)


def test_a_gate_that_was_true_or_false_is_a_word_of_today():
    for name, gate in (("softmax", "none"), ("gated_deltanet", "silu")):
        kept = load_record(STORED / "checkpoint-format-1" / name / "step-00000003")
        assert [mixer.options["output_gate"] for mixer in kept.mixers] == [gate] * len(kept.mixers)
    elsewhere = MixerSettings(name="mine", target="mine.Mine", options={"output_gate": True})
    assert current_mixer(elsewhere) == elsewhere


def test_there_is_a_stored_checkpoint_of_every_format():
    formats = {int(path.name.rpartition("-")[2]) for path in STORED.glob("checkpoint-format-*")}
    assert formats == set(range(1, stored.FORMAT + 1))
