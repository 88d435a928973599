"""One training of a probe's task: its rows, how it is resumed, and what it leaves where it cannot be done."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from probe_settings import probe_settings

from attnbench.cli.compose import CONF, compose
from attnbench.evals.lib import solving
from attnbench.evals.lib.sequences import TrainingSequences
from attnbench.evals.runners import prepare_probe as prepare_probe_module
from attnbench.evals.runners import probe
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.probe import ProbeJob
from attnbench.mixers.softmax import Softmax
from attnbench.model.building import build_model
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.results.rows import EVALUATION_OPTIONS, Measurement, ResultRow
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import SELECTION_SEED, RecipeSettings, RunSettings, TrainSettings
from attnbench.training import checkpoint, learning_rate, run
from attnbench.training.hooks import Sitting
from attnbench.training.learning_rate import learning_rates
from attnbench.training.log import read_metrics
from attnbench.training.step import batch_nats, loss_and_gradients
from attnbench.verdict.axes import PER_RUN

CLOCKS = ("seconds", "tokens_per_second", "generator_tokens_per_second")
"""What two equal trainings may differ in."""


pytestmark = pytest.mark.usefixtures("one_thread")


def prepared(settings: RunSettings, rate: float = 1e-2, task: int = 0) -> ProbeJob:
    [evaluation] = settings.evaluations
    return prepare_probe(settings, evaluation)[1][task].at(rate, settings.seed)


def rows(settings: RunSettings, rate: float = 1e-2) -> list[ResultRow]:
    job = prepared(settings, rate)
    run_jobs([job])
    return read_results(job.results)


def numbers(found: list[ResultRow]) -> list[tuple]:
    """What two equal trainings agree in."""
    kept = [row.measurement for row in found if row.measurement.metric not in CLOCKS]
    return [(own.metric, own.value, own.status, json.dumps(own.settings)) for own in kept]


def steps(own: ProbeJob) -> list[dict]:
    logged = read_metrics(own.folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in logged]


def weights(own: ProbeJob) -> bytes:
    return (own.folder / "checkpoint" / "final" / "weights.safetensors").read_bytes()


def with_few_steps(monkeypatch: pytest.MonkeyPatch, *, check_steps: int, decay_steps: int) -> None:
    """Look at validation data as often, and let the rate fall over so many steps, after a warm-up of two."""
    monkeypatch.setattr(solving, "CHECK_STEPS", check_steps)
    monkeypatch.setattr(learning_rate, "MIN_DECAY_STEPS", decay_steps)
    short = {"warmup_steps": 2}
    monkeypatch.setattr(prepare_probe_module, "TrainSettings", lambda **given: TrainSettings(**{**given, **short}))


def test_a_scored_training_has_every_row(tmp_path):
    settings = probe_settings(tmp_path, name="recall")
    own = prepared(settings)
    assert own.matched is not None
    found = rows(settings)
    metrics = [row.measurement.metric for row in found]
    assert sorted(metrics) == sorted(
        [
            *("selection", "steps_trained", "steps_to_95", "samples_to_95", "accuracy", "solved", "parameters"),
            *("forward_flops_per_token", "state_bytes", "generator_tokens_per_second", "tokens_per_second"),
        ]
    )
    by_metric = {row.measurement.metric: row.measurement for row in found}
    assert by_metric["steps_to_95"].status == "not_reached"
    for row in found:
        assert row.measurement.settings["learning_rate"] == 1e-2
        assert row.measurement.settings["sequence_length"] == 16
        assert row.identity.run == own.folder.name
        assert (row.identity.seed, row.identity.corpus, row.identity.model) == (0, None, "recall-16")
        assert row.identity.config_hash == own.config_hash
        assert row.identity.parameters == by_metric["parameters"].value
    # Of 16 positions two ask for the value of a pair, and logits are read there alone.
    model = build_model(own.mixers, own.matched.model, vocabulary_size=own.task.vocabulary_size, seed=0)
    assert by_metric["forward_flops_per_token"].value == (model.forward_flops(16, num_logits=2) or 0) / 16
    assert own.folder.parent == tmp_path / "demo" / "cells"
    assert checkpoint.is_final(own.folder / "checkpoint")
    assert {"config.yaml", "environment.json", "train.log", "metrics.jsonl"} <= {
        path.name for path in own.folder.iterdir()
    }
    assert "match=none (no feed-forward whose width could be solved): " in (own.folder / "train.log").read_text()


def test_the_seed_that_rates_are_chosen_on_is_not_scored(tmp_path):
    found = rows(replace(probe_settings(tmp_path), seed=SELECTION_SEED))
    assert {"selection", "steps_to_95"} <= {row.measurement.metric for row in found}
    assert not any(row.measurement.settings.get("split") == "test" for row in found)


def test_steps_to_95_are_those_of_the_first_check_of_two_in_a_row(tmp_path, monkeypatch):
    settings = probe_settings(tmp_path, copy_num_steps=10)
    # As `selection` is looked at after every second step, and once more at the end.
    monkeypatch.setattr(solving, "CHECK_STEPS", 2)
    seen = iter([0.95, 0.1, 0.96, 0.97, 0.2, 0.2])
    monkeypatch.setattr(probe, "mean_accuracy", lambda *_: next(seen))
    found = {row.measurement.metric: row.measurement for row in rows(settings)}
    assert (found["steps_to_95"].value, found["steps_to_95"].settings["budget"]) == (6, 10)
    assert (found["samples_to_95"].value, found["samples_to_95"].settings["budget"]) == (6 * 8, 10 * 8)
    assert (found["selection"].value, found["solved"].value) == (0.2, 0)
    logged = [row for row in steps(prepared(settings)) if "selection" in row]
    assert [(row["step"], row["selection"]) for row in logged] == [(2, 0.95), (4, 0.1), (6, 0.96), (8, 0.97), (10, 0.2)]


def test_the_share_of_the_steps_in_which_accuracy_rises_is_a_row_where_checks_are_asked_for(tmp_path, monkeypatch):
    plain = probe_settings(tmp_path, name="recall", recall_num_steps=10)
    settings = probe_settings(tmp_path, name="recall", recall_num_steps=10, recall_check_interval_steps=2)
    assert prepared(settings).config_hash != prepared(plain).config_hash
    assert prepared(settings).protocol()["stop"]["check_steps"] == 2
    for seen, value in (([0.05, 0.3, 0.2, 0.91, 0.9], 0.5), ([0.05, 0.3, 0.2, 0.89, 0.9], 0.6), ([0.2] * 5, None)):
        checks = iter([*seen, seen[-1]])
        monkeypatch.setattr(probe, "mean_accuracy", lambda *_, checks=checks: next(checks))
        found = {row.measurement.metric: row.measurement for row in rows(replace(settings, rerun=True))}
        rise = found["rise_share"]
        assert rise.value == pytest.approx(value) if value is not None else rise.status == "not_reached"
        assert rise.settings["budget"] == 1.0
    monkeypatch.setattr(probe, "mean_accuracy", lambda *_: 0.5)
    assert "rise_share" not in {row.measurement.metric for row in rows(plain)}


@pytest.mark.parametrize(
    ("seen", "reached", "last"),
    [
        # At 0.99 it ends at once; the line down takes 100 steps, or a fifth of all.
        ([0.1] * 4 + [0.99], 100, 200),
        ([0.1] * 20 + [0.1, 0.1, 0.99], 700, 875),
        # At 0.95 after twice the steps that took.
        ([0.1] * 3 + [0.95], 80, 260),
        # A mean of accuracies that is 0.95 or 0.99 but for rounding is.
        ([0.1] * 3 + [0.95 - 1e-16], 80, 260),
        ([0.1] * 4 + [0.99 - 1e-16], 100, 200),
        # Near the end of the budget the line has begun, and is not begun anew.
        ([0.1] * 24 + [0.99], 900, 1000),
        ([0.1], None, 1000),
    ],
)
def test_a_training_ends_once_its_task_is_solved(seen, reached, last, tmp_path):
    job = prepared(probe_settings(tmp_path, copy_num_steps=1000))
    checks = [step for step in range(1, 1001) if solving.is_check(step)]
    assert checks[:3] == [20, 40, 60]
    assert checks[-2:] == [900, 1000]
    state: Any = SimpleNamespace(step=0, last_step=None, passed_step=None, reached_step=None)
    scores = [*seen, *[seen[-1]] * len(checks)]
    for step, selection in zip(checks, scores, strict=False):
        state.step = step
        end = job.new_end(state, {"selection": selection})
        state.last_step = state.last_step or end
    assert (state.reached_step, state.last_step or 1000) == (reached, last)


def test_a_training_past_the_limit_of_its_search_leaves_it_unless_it_has_arrived(tmp_path, monkeypatch):
    with_few_steps(monkeypatch, check_steps=2, decay_steps=10)
    settings = replace(probe_settings(tmp_path, copy_num_steps=30), seed=SELECTION_SEED)
    job = prepared(settings)
    for seen, last in (([0.1, 0.2, 0.3], 6), ([0.1, 0.2, 0.96, 0.97, *[0.97] * 9], 22), ([0.1, 0.2, 0.96, 0.1], 8)):
        checks = iter([*seen, seen[-1]])
        monkeypatch.setattr(probe, "mean_accuracy", lambda *_, checks=checks: next(checks))
        limited = job.at(1e-2, SELECTION_SEED, limit=5)
        assert limited.config_hash != job.config_hash
        limited.settings.rerun = True
        run_jobs([limited])
        found = {row.measurement.metric: row.measurement for row in read_results(limited.results)}
        assert found["steps_trained"].value == last
        assert found["steps_to_95"].status == ("ok" if last == 22 else "not_reached")
    assert "at 5 another rate had solved all its seeds" in found["steps_to_95"].reason


def test_with_fixed_steps_all_are_made_with_a_cosine(tmp_path, monkeypatch):
    monkeypatch.setattr(solving, "CHECK_STEPS", 2)
    job = prepared(probe_settings(tmp_path, copy_num_steps=20, copy_fixed_steps=True))
    monkeypatch.setattr(probe, "mean_accuracy", lambda *_: 1.0)
    monkeypatch.setattr(type(job.task), "score", lambda *_: iter([Measurement(
        metric="symbol_accuracy", value=0.95, unit="", settings={"length": 2, "beyond_training": False})]))  # fmt: skip
    run_jobs([job])
    found = {row.measurement.metric: row.measurement for row in read_results(job.results)}
    assert (found["steps_trained"].value, found["steps_to_95"].value, found["solved"].value) == (20, 2, 1)
    assert job.train.decay_fraction is None


def test_a_training_is_run_again_only_with_rerun_to_the_same_numbers(tmp_path, monkeypatch):
    settings = probe_settings(tmp_path)
    first, job = rows(settings), prepared(settings)
    # The last step is looked at whatever the interval.
    selected = next(row.measurement.value for row in first if row.measurement.metric == "selection")
    last = steps(job)[-1]
    assert (last["step"], last["selection"]) == (10, selected)
    before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(run, "train", None)
        assert rows(settings) == first
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")} == before
    assert numbers(rows(replace(settings, rerun=True))) == numbers(first)
    assert job.results.stat().st_mtime_ns > before[job.results]


class StoppedError(Exception):
    """What ends a process at once, in these tests."""


@pytest.mark.parametrize(("attn", "dropout"), [("softmax", None), ("gated_deltanet", None), ("softmax", 0.2)])
def test_stopped_and_resumed_is_to_the_bit_what_was_never_stopped(attn, dropout, tmp_path, monkeypatch):
    # Solved at step 6, from where the rate falls over steps that none is left out of.
    with_few_steps(monkeypatch, check_steps=3, decay_steps=6)
    monkeypatch.setattr(solving, "SOLVED", 0.0)
    given = {"attn": attn, "copy_num_steps": 20, "copy_embedding_dropout": dropout}
    whole = probe_settings(tmp_path / "whole", **given)
    expected = numbers(rows(whole))
    assert steps(prepared(whole))[-1]["step"] == 12
    settings = probe_settings(tmp_path / "cut", **given)
    own = prepared(settings)

    def stopping(step: int, how: str):
        def hook(self, state, report, keep=Sitting.keep):
            if state.step == step and how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            keep(self, state, report)
            if state.step == step and how == "death":
                raise StoppedError

        return hook

    # Saved at step 4; killed without a word at 7, whose rows of metrics are already there; saved at 10.
    for step, how, error in ((4, "signal", Interrupted), (7, "death", StoppedError), (10, "signal", Interrupted)):
        with monkeypatch.context() as patch:
            patch.setattr(Sitting, "keep", stopping(step, how))
            with pytest.raises(error):
                run_jobs([own])
        assert not own.results.exists()
    assert numbers(rows(settings)) == expected
    assert steps(own) == steps(prepared(whole))
    assert weights(own) == weights(prepared(whole))


@pytest.mark.parametrize("call", [2, 5], ids=["amid", "scoring"])
def test_a_stop_cuts_off_a_look_at_validation_data_which_is_made_again(call, tmp_path, monkeypatch):
    monkeypatch.setattr(solving, "CHECK_STEPS", 3)
    expected, own = (
        rows(probe_settings(tmp_path / "whole", copy_num_steps=12)),
        probe_settings(tmp_path, copy_num_steps=12),
    )
    calls = []

    act = probe.mean_accuracy

    def select(*given):
        calls.append(given)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on")
        return act(*given)

    with monkeypatch.context() as patch:
        patch.setattr(probe, "mean_accuracy", select)
        with pytest.raises(Interrupted) as caught:
            rows(own)
    assert caught.value.exit_code == 143
    assert not prepared(own).results.exists()
    assert numbers(rows(own)) == numbers(expected)
    assert steps(prepared(own)) == steps(prepared(probe_settings(tmp_path / "whole", copy_num_steps=12)))


def test_a_signal_during_the_last_step_ends_the_command_after_the_scores(tmp_path, monkeypatch):
    def signalled(self, state, report):
        self.stop.saves = True
        if state.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Sitting, "keep", signalled)
    settings = probe_settings(tmp_path)
    with pytest.raises(Interrupted, match="the same command"):
        run_jobs([prepared(settings)])
    assert prepared(settings).results.exists()


def expect_failed(found: list[ResultRow], settings: RunSettings, status: str, reason: str) -> None:
    """Every score that the task names has a row that says why it has no number."""
    task = prepared(settings).task
    # The training of few steps has no speed, whatever became of its scores.
    failed = [row.measurement for row in found if row.measurement.status not in ("ok", "not_reached")]
    assert {own.status for own in failed} == {status}
    assert all(reason in own.reason for own in failed)
    places = [(metric, own) for metric, own in task.axes()]
    places += [("selection", {"split": "validation"}), ("solved", {"split": "test", "chance": 0.0})]
    for metric, budget in (("steps_to_95", task.num_steps), ("samples_to_95", task.num_steps * task.batch_size)):
        places.append((metric, {"split": "validation", "budget": budget}))
    named = [(own.metric, json.dumps(own.settings, sort_keys=True)) for own in failed]
    said = found[0].measurement.settings
    common = {**task.settings, **{name: said[name] for name in PER_RUN if name in said}}
    expected = [(metric, json.dumps({**common, **own}, sort_keys=True)) for metric, own in places]
    assert sorted(named) == sorted(expected)


@pytest.mark.parametrize("name", ["copy", "recall"])
def test_a_rate_that_diverges_is_rows_that_say_so(name, tmp_path):
    settings = probe_settings(tmp_path, name=name)
    found = rows(settings, rate=1e30)
    expect_failed(found, settings, "diverged", "diverged by step")
    assert {"parameters", "state_bytes"} <= {row.measurement.metric for row in found}


@pytest.mark.parametrize("place", ["training", "scoring"])
def test_out_of_memory_is_rows_and_the_next_training_runs(place, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    settings = probe_settings(tmp_path)
    with monkeypatch.context() as patch:
        if place == "training":
            patch.setattr(run, "train", full)
        else:
            task = prepared(settings).task
            patch.setattr(type(task), "score", full)
        expect_failed(rows(settings), settings, "out_of_memory", "out of memory")
    assert all(row.measurement.status in ("ok", "not_reached") for row in rows(settings, rate=3e-3))


def test_a_kernel_that_cannot_do_the_task_is_rows_with_its_reason(tmp_path, monkeypatch):
    settings = probe_settings(tmp_path)

    def refuse(*_, **__):
        raise UserError("attn.backend=sdpa: no head of 8 channels")

    monkeypatch.setattr(Softmax, "choose_backend", refuse)
    found = rows(settings)
    expect_failed(found, settings, "unsupported", "no head of 8 channels")
    assert {row.identity.parameters for row in found} == {None}
    assert {row.identity.backend for row in found} == {"none"}


class WithoutConvolution(Softmax):
    """A mixer that has no short convolution."""

    def __init__(self, *, dim: int, head_width: int, num_heads: int | None, backend: str) -> None:
        super().__init__(  # pyright: ignore[reportCallIssue]
            dim=dim, head_width=head_width, num_heads=num_heads, backend=backend
        )


def test_a_wish_that_a_mixer_cannot_have_stands_in_its_rows(tmp_path):
    settings = probe_settings(tmp_path)
    assert not any("not_applicable" in row.measurement.settings for row in rows(settings))
    target = f"{__name__}.WithoutConvolution"
    trust([target])
    mixer = replace(settings.mixer, name="bare", target=target, options={"num_heads": None, "backend": "auto"})
    found = rows(replace(settings, mixer=mixer))
    # It has no gate, which is what the probe wishes.
    assert all(row.measurement.settings["not_applicable"] == ["conv_size"] for row in found)
    bare = RecipeSettings(name="bare", conv_size=0, output_gate="none")
    assert prepared(replace(settings, mixer=mixer, recipe=bare)).not_applicable == []
    assert {row.identity.mixer for row in found} == {"WithoutConvolution"}


def test_the_size_is_the_task_s_whatever_the_mixer_or_the_run_has(tmp_path):
    given = {"attn": "gated_deltanet", "name": "recall", "recall_widths": [32]}
    plain = prepared(probe_settings(tmp_path, **given))
    own = prepared(probe_settings(tmp_path, "model.dim=128", "model.head_width=64", **given))
    assert own.config_hash == plain.config_hash
    assert own.matched is not None
    assert (own.matched.model.dim, own.matched.model.head_width) == (32, 32)
    assert own.mixers[0].options["conv_size"] == 4
    assert own.mixers[0].options["output_gate"] == "none"


@pytest.mark.parametrize(
    ("word", "attn"),
    [
        ("attn.conv_size=0", "softmax"),
        ("attn.conv_size=0", "gated_deltanet"),
        ("attn.num_key_value_heads=1", "softmax"),
        ("attn.num_heads=4", "linear"),
        ("+attn.head_width=16", "softmax"),
        ("attn.output_gate=silu", "softmax"),
        ("attn.qk_norm=true", "linear"),
    ],
)
@pytest.mark.parametrize("name", ["copy", "recall"])
def test_what_a_variant_names_wins_over_what_a_probe_wishes(word, attn, name, tmp_path):
    given = {"copy": {"copy_width": 32, "copy_head_width": 16}, "recall": {"recall_widths": [32]}}[name]
    plain = prepared(probe_settings(tmp_path, attn=attn, name=name, **given))
    own = prepared(probe_settings(tmp_path, word, attn=attn, name=name, **given))
    option, _, value = word.removeprefix("+").removeprefix("attn.").partition("=")
    assert own.mixers[0].options[option] == yaml.safe_load(value)
    assert own.config_hash != plain.config_hash
    assert {name: kept for name, kept in own.mixers[0].options.items() if name != option} == {
        name: kept for name, kept in plain.mixers[0].options.items() if name != option
    }


def test_what_an_experiment_names_wins_too_and_what_a_yaml_of_the_mixer_says_does_not(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "attn").mkdir()
    (tmp_path / "experiment" / "first.yaml").write_text("# @package _global_\nattn: {conv_size: 0}\n")
    (tmp_path / "experiment" / "bare.yaml").write_text(
        "# @package _global_\ndefaults: [first, override /model: tiny]\nattn: {output_gate: silu}\n"
    )
    content = (CONF / "attn" / "softmax.yaml").read_text().replace("conv_size: 0", "conv_size: 2")
    (tmp_path / "attn" / "twice.yaml").write_text(content)
    words = ["device=cpu", "eval=[copy]", f"hydra.searchpath=[file://{tmp_path}]", "attn=twice"]
    assert compose([*words, "experiment=bare"]).named_options == ["conv_size", "output_gate"]
    plain = compose(words)
    assert plain.named_options == []
    assert prepared(plain).mixers[0].options["conv_size"] == 4


def test_a_row_says_what_the_mixer_and_the_evaluation_were(tmp_path):
    for row in rows(probe_settings(tmp_path, "attn.qk_norm=true")):
        settings = row.measurement.settings
        assert settings["mixer_options"] == {
            **{"num_heads": None, "num_key_value_heads": None, "rotary_theta": 10000.0, "conv_size": 4},
            **{"conv_on": None, "qk_norm": True, "output_norm": False, "output_gate": "none"},
        }
        expected = {"num_steps": 10, "batch_size": 8, "dim": 16, "num_layers": 2, "max_length": 4, "selective": False}
        assert expected.items() <= settings["evaluation_options"].items()


def test_the_hash_changes_with_all_that_changes_numbers_and_with_nothing_else(tmp_path):
    def hashed(*overrides: str, rate: float = 1e-2, **changed) -> str:
        return prepared(probe_settings(tmp_path, *overrides, **changed), rate).config_hash

    assert hashed() == hashed("outputs_dir=elsewhere", "rerun=true", "logger=offline", "seq_len=64")
    hashes = [
        hashed(),
        hashed("seed=1"),
        hashed(rate=3e-3),
        hashed("attn.rotary_theta=100"),
        hashed(attn="linear"),
        hashed(copy_precision="bfloat16"),
        hashed(copy_precision="bfloat16_weights"),
        hashed(copy_num_steps=11),
        hashed(copy_conv_size=3),
        hashed(copy_num_test=17),
        hashed(name="recall"),
        hashed(name="state_tracking"),
        hashed(name="state_tracking", state_tracking_length_buckets=True),
    ]
    assert len(set(hashes)) == len(hashes)


def test_one_value_more_changes_no_other_training(tmp_path):
    one = probe_settings(tmp_path, name="recall")
    more = probe_settings(tmp_path, name="recall", recall_cells=[[8, 2], [16, 2]], recall_learning_rates=[1e-2, 1e-1])
    assert prepared(more, task=1).folder == prepared(one).folder
    assert prepared(more, task=0).folder != prepared(one).folder


def test_the_device_is_made_ready_before_sequences_are_generated_and_timed(tmp_path, monkeypatch):
    job, events = prepared(probe_settings(tmp_path)), []
    generate = type(job.task).sequences

    def sequences(*given):
        events.append("generated")
        return generate(*given)

    monkeypatch.setattr(type(job.task), "sequences", sequences)
    monkeypatch.setattr(run, "start_afresh", lambda device, shape=None: events.append("ready"))
    run_jobs([job])
    assert events[0] == "ready"
    assert events.count("ready") == 1


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say what a process holds")
def test_trainings_in_one_process_hold_no_more_memory_than_the_first_ten(tmp_path):
    settings = probe_settings(tmp_path, copy_num_steps=1)
    held = []
    for number in range(20):
        run_jobs([prepared(replace(settings, seed=number))])
        held.append(resident_mib())
    assert held[-1] - held[9] < 10


def test_a_training_as_published_is_told_by_its_rows_and_its_hash(tmp_path):
    published = {
        **{"fixed_steps": True, "warmup_steps": 2, "decay_fraction": 1.0, "final_rate_fraction": 0.0},
        **{"weight_decay": 0.01, "beta1": 0.8, "beta2": 0.999, "epsilon": 1e-6, "clip_norm": 0.0},
        "rate_interval_steps": 5,
    }
    settings = probe_settings(tmp_path, **{f"copy_{name}": value for name, value in published.items()})
    usual, own = prepared(probe_settings(tmp_path, copy_fixed_steps=True)), prepared(settings)
    named = {name: value for name, value in published.items() if name != "fixed_steps"}
    assert {name: getattr(own.train, name) for name in named} == named
    assert own.config_hash != usual.config_hash
    options = own.row_settings()[EVALUATION_OPTIONS]
    assert named.items() <= options.items()
    assert not named.keys() & usual.row_settings()[EVALUATION_OPTIONS].keys()
    rates = learning_rates(own.train, 12)
    # After a warm-up of two, in a line to 0 over the other ten, at every fifth step.
    assert rates.tolist() == pytest.approx([0.005] * 5 + [0.006] * 5 + [0.001] * 2)


def test_the_model_of_a_probe_has_another_norm_and_logits_of_their_own(tmp_path):
    own = prepared(probe_settings(tmp_path, copy_norm="layer", copy_untied=True))
    assert own.config_hash != prepared(probe_settings(tmp_path)).config_hash
    assert {"norm": "layer", "untied": True}.items() <= own.row_settings()[EVALUATION_OPTIONS].items()
    own.sequences = TrainingSequences(own.task, 0, own.device)
    model = own.build()
    _, gradients = loss_and_gradients(model, own.batches(0), None, "float32")
    assert gradients.keys() == dict(model.named_parameters()).keys() >= {"head.weight", "norm.bias"}


def test_dropout_of_the_embedding_is_a_function_of_seed_and_step(tmp_path):
    usual, own = (prepared(probe_settings(tmp_path, copy_embedding_dropout=share)) for share in (None, 0.25))
    options = own.row_settings()[EVALUATION_OPTIONS]
    assert (options["dropout"], options["dropout_of"]) == (0.25, "embedding")
    assert not {"dropout", "dropout_of", "embedding_dropout"} & usual.row_settings()[EVALUATION_OPTIONS].keys()
    assert own.config_hash != usual.config_hash
    other = own.at(1e-2, 1)
    for job in (usual, own, other):
        job.load_data()
    assert usual.batches(3).dropout_B is None
    first: Any = own.batches(3).dropout_B
    assert len(first) == own.task.batch_size
    assert torch.equal(own.batches(3).dropout_B, first)
    assert all(not torch.equal(batch.dropout_B, first) for batch in (own.batches(4), other.batches(3)))
    # Every training batch differs from the usual one, validation and test data do not.
    model, batch = own.build(), own.batches(0)
    with_keys, without = (batch_nats(model, batch.wide()._replace(dropout_B=keys)) for keys in (first, None))
    assert with_keys != without
    assert torch.equal(without, batch_nats(usual.build(), usual.batches(0).wide()))


def test_a_doubled_residual_is_told_by_rows_and_hash(tmp_path):
    usual, own = (prepared(probe_settings(tmp_path, copy_doubled_residual=on)) for on in (False, True))
    assert own.config_hash != usual.config_hash
    assert own.row_settings()[EVALUATION_OPTIONS]["doubled_residual"] is True
    assert "doubled_residual" not in usual.row_settings()[EVALUATION_OPTIONS]


def test_a_published_threshold_ends_a_training_of_fixed_steps(tmp_path, monkeypatch):
    settings = probe_settings(tmp_path, copy_num_steps=10, copy_fixed_steps=True, copy_stop_at=0.9)
    monkeypatch.setattr(solving, "CHECK_STEPS", 2)
    seen = iter([0.5, 0.9, 0.9])
    monkeypatch.setattr(probe, "mean_accuracy", lambda *_: next(seen))
    own = prepared(settings)
    [trained] = [row.measurement for row in rows(settings) if row.measurement.metric == "steps_trained"]
    assert trained.value == 4
    assert own.protocol()["stop"] == {"stop_at": 0.9}
