"""Whole runs: what they leave behind, how they are found again, stopped, resumed, and how they fail."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
import scipy.stats
import torch
import yaml
from outside_mixers import settings_of
from runs import call, command, environment, launched, words, write_text
from scripts_here import run_here
from small import compose_once

from attnbench.comparison.execute import run
from attnbench.evals.lib.token_scores import full_context
from attnbench.evals.runners.checkpoint import language_model_job
from attnbench.model.stored import load_model
from attnbench.report.terminal import print_summary
from attnbench.results.folder import ROOT
from attnbench.results.identity import config_hash
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.errors import Interrupted, UserError
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError, Sitting
from attnbench.training.log import read_metrics
from attnbench.training.prepare import prepare
from attnbench.verdict.axes import axes

CLOCKS = ("seconds", "tokens_per_second")
"""What two equal runs may differ in."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a text, small.txt, and the runs trained on it."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "small.txt", seed=0)
    return folder


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    """A finished run; tests only read it."""
    return run(compose_once(words(folder)))


def rows_of(run_folder: Path, evaluation: str) -> list[ResultRow]:
    [path] = (run_folder / "results").glob(f"{evaluation}-*.jsonl")
    return read_results(path)


def test_a_bounded_number_says_so_in_its_row(folder, finished):
    bounds = ("train.validation_characters=60", "eval.perplexity.characters=100")
    place = run(compose_once(words(folder, *bounds, outputs="bounded")))
    assert {row["characters"] for row in read_metrics(place / "metrics.jsonl") if "split" in row} == {60}
    found = {
        row.measurement.settings["characters"] for row in rows_of(place, "training") if axes(row.measurement.settings)
    }
    assert found == {60}
    scored = [row.measurement for row in rows_of(place, "perplexity")]
    assert {own.settings["characters"] for own in scored} == {100}
    counts = {(own.settings.get("context"), own.num_samples) for own in scored if "position_bucket" not in own.settings}
    assert counts == {(None, 99), ("full", 99 - 16), ("full", 99 - 32)}
    # More than there are are all, and nothing is said of it but in the identity.
    more = run(compose_once(words(folder, "eval.perplexity.characters=1000000", outputs="more")))
    assert more.name == finished.name
    found = [[row.measurement for row in rows_of(one, "perplexity")] for one in (more, finished)]
    assert [(own.metric, own.value, axes(own.settings)) for own in found[0]] == [
        (own.metric, own.value, axes(own.settings)) for own in found[1]
    ]


def value(rows: Sequence[ResultRow], metric: str, **settings: object) -> tuple[float, int]:
    """The one row of these settings: its number and its number of samples."""
    [found] = [
        row.measurement
        for row in rows
        if row.measurement.metric == metric
        and axes(row.measurement.settings) | {"chance": 0} == {**settings, "chance": 0}
    ]
    assert found.value is not None
    assert found.num_samples is not None
    return found.value, found.num_samples


def without_clocks(run_folder: Path) -> list[dict]:
    rows = read_metrics(run_folder / "metrics.jsonl")
    return [{name: entry for name, entry in row.items() if name not in CLOCKS} for row in rows]


def final_bytes(run_folder: Path) -> bytes:
    return (run_folder / "checkpoint" / "final" / "weights.safetensors").read_bytes()


def test_a_run_leaves_what_it_says(folder, finished):
    assert finished.parent == folder / "outputs" / "demo"
    name, _, hashed = finished.name.rpartition("-")
    assert name == "softmax-tiny-T32-seed0"
    assert len(hashed) == 8
    assert int(hashed, 16) >= 0
    files = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    results = {file for file in files if file.startswith("results/")}
    assert {file.split("-")[0] for file in results} == {"results/training", "results/perplexity"}
    assert f"results/training-{hashed}.jsonl" in results
    best = checkpoint.best_folder(finished / "checkpoint").name
    kept = {
        f"checkpoint/{which}/{file}"
        for which in ("final", best)
        for file in ("config.json", "weights.safetensors", "state.json")
    }
    assert files - results == {"config.yaml", "environment.json", "train.log", "metrics.jsonl", "sample.json"} | kept
    # What a run is told goes to the file as well as to the terminal.
    log = (finished / "train.log").read_text()
    assert "match=params: softmax has" in log
    assert "evaluating perplexity of softmax" in log


def test_the_config_of_a_run_holds_what_was_given_and_what_it_came_to(finished):
    content = yaml.safe_load((finished / "config.yaml").read_text())
    assert content["train"]["precision"] == "auto"
    assert content["mixer"]["options"]["backend"] == "auto"
    resolved = content["resolved"]
    assert resolved["precision"] == "float32"
    assert resolved["backend"] == "torch"
    assert resolved["compile"] is False
    assert resolved["num_steps"] == 12
    assert finished.name.endswith(resolved["config_hash"])
    model, kept = load_model(finished / "checkpoint" / "final")
    assert model.num_parameters() == resolved["parameters"]
    assert kept.corpus == resolved["corpus"]
    assert kept.match == content["match"] == "params"
    stamp = json.loads((finished / "environment.json").read_text())
    assert stamp["torch"] == torch.__version__


def test_every_logged_step_and_validation_is_a_line(finished):
    rows = read_metrics(finished / "metrics.jsonl")
    steps = [row for row in rows if "split" not in row]
    validations = [row for row in rows if "split" in row]
    assert [row["step"] for row in steps] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in validations] == [4, 8, 12]
    for row in steps:
        assert set(row) == {"step", "tokens", "loss", "gradient_norm", "learning_rate", *CLOCKS}
    for row in validations:
        assert row["split"] == "validation"
        assert row["perplexity"] == pytest.approx(math.exp(row["nats_per_character"]))
    assert all(row["tokens"] == row["step"] * 4 * 32 for row in rows)
    assert steps[0]["learning_rate"] == pytest.approx(4e-3)
    assert steps[-1]["learning_rate"] == pytest.approx(4e-4)
    assert steps[-1]["loss"] < steps[0]["loss"]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_rows_say_whose_they_are(folder, finished):
    prepared = prepare(compose_once(words(folder)))
    training, perplexity = rows_of(finished, "training"), rows_of(finished, "perplexity")
    for row in [*training, *perplexity]:
        own = row.identity
        assert own.run == finished.name
        assert (own.experiment, own.variant, own.mixer, own.model) == ("demo", "softmax", "Softmax", "tiny")
        assert own.corpus == f"text:small@{prepared.corpus.fingerprint}"
        assert (own.backend, own.precision, own.seq_len, own.seed) == ("torch", "float32", 32, 0)
        assert own.parameters == prepared.new_model().num_parameters()
    assert {row.identity.evaluation for row in training} == {"training"}
    assert {row.identity.config_hash for row in training} == {prepared.config_hash}
    assert {row.identity.evaluation for row in perplexity} == {"perplexity"}
    [of_perplexity] = {row.identity.config_hash for row in perplexity}
    assert of_perplexity != prepared.config_hash
    metrics = {row.measurement.metric: row.measurement for row in training}
    seconds = read_metrics(finished / "metrics.jsonl")[-2]["seconds"]
    assert metrics["train_seconds"].value == pytest.approx(seconds, rel=0.2)
    assert metrics["tokens_per_second"].status == "not_reached"
    assert "12 steps" in metrics["tokens_per_second"].reason


def nats_by_hand(model: torch.nn.Module, tokens_N: torch.Tensor, seq_len: int) -> torch.Tensor:
    """-log p of every character but the first, from those before it in its block."""
    nats = []
    for start in range(0, len(tokens_N) - 1, seq_len):
        block = tokens_N[start : start + seq_len + 1].long()
        logits_BTC, _ = model(block[None, :-1])
        log_p_TC = logits_BTC[0].double().log_softmax(-1)
        nats += [-log_p_TC[position, target] for position, target in enumerate(block[1:])]
    return torch.stack(nats)


@torch.no_grad()
def test_perplexity_is_exp_of_the_mean_loss_over_the_split(folder, finished):
    corpus, rows = prepare(compose_once(words(folder))).corpus, rows_of(finished, "perplexity")
    best = checkpoint.best_folder(finished / "checkpoint")
    for which, place in (("best", best), ("final", finished / "checkpoint" / "final")):
        model, _ = load_model(place)
        for split in ("validation", "test"):
            nats = nats_by_hand(model, corpus.tokens[split], 32)
            axes = {"split": split, "checkpoint": which, "sequence_length": 32}
            perplexity, count = value(rows, "perplexity", **axes)
            assert count == len(corpus.tokens[split]) - 1 == len(nats)
            assert perplexity == pytest.approx(float(nats.mean().exp()), rel=1e-5)
            assert value(rows, "bits_per_character", **axes)[0] == pytest.approx(
                float(nats.mean()) / math.log(2), rel=1e-5
            )
    model, _ = load_model(finished / "checkpoint" / "final")
    axes = {"split": "test", "checkpoint": "final", "sequence_length": 64}
    longer = nats_by_hand(model, corpus.tokens["test"], 64)
    assert value(rows, "perplexity", **axes) == (pytest.approx(float(longer.mean().exp()), rel=1e-5), len(longer))


@torch.no_grad()
def test_with_full_context_a_character_is_predicted_from_half_a_window_at_least(folder, finished):
    corpus, rows = prepare(compose_once(words(folder))).corpus, rows_of(finished, "perplexity")
    model, _ = load_model(finished / "checkpoint" / "final")
    for split, length in (("test", 32), ("validation", 32), ("test", 64)):
        tokens_N, half, nats = corpus.tokens[split].long(), length // 2, []
        for start in range(0, len(tokens_N) - 1 - half, half):
            window = tokens_N[start : start + length + 1]
            log_p_TC = model(window[None, :-1])[0][0].double().log_softmax(-1)
            nats += [-log_p_TC[position, window[position + 1]] for position in range(half, len(window) - 1)]
        nats_N = torch.stack(nats)
        axes = {"split": split, "checkpoint": "final", "sequence_length": length, "context": "full"}
        assert value(rows, "nats_per_character", **axes) == (pytest.approx(float(nats_N.mean()), rel=1e-5), len(nats_N))
        assert len(nats_N) == len(tokens_N) - 1 - half
        [row] = [
            row.measurement
            for row in rows
            if row.measurement.metric == "nats_per_character" and axes.items() <= row.measurement.settings.items()
        ]
        shares = torch.bincount(corpus.tokens["train"].long(), minlength=len(corpus.vocabulary)) + 1
        unigram = -(shares / shares.sum()).log()[tokens_N[1 + half :]].mean()
        assert row.settings["chance"] == pytest.approx(float(unigram), abs=1e-5)
        assert row.value is not None
        # Of as many blocks as there are whole windows; Student's of their means.
        means = [float(block.mean()) for block in nats_N.tensor_split(min(20, len(nats_N) // length))]
        width = stdev(means) / math.sqrt(len(means)) * float(scipy.stats.t.ppf(0.975, len(means) - 1))
        assert (row.low, row.high) == pytest.approx((row.value - width, row.value + width), rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("num", [1, 3, 16, 37])
def test_every_character_from_half_a_window_on_counts_once_and_in_a_last_half(length, num):
    position_N = torch.arange(num) % length
    in_window_N = full_context(position_N, lambda start: torch.arange(num - start) % length, length)
    assert (in_window_N >= length // 2).all()
    index_N = full_context(torch.arange(num), lambda start: torch.arange(start, num), length)
    assert index_N.tolist() == list(range(length // 2, num))


def test_the_best_weights_are_evaluated_as_the_best(finished, copied, tmp_path):
    next(copied.glob("results/perplexity-*")).unlink()
    best = checkpoint.best_folder(copied / "checkpoint")
    model, kept = load_model(best)
    with torch.no_grad():
        model.embedding.weight.zero_()
    state = checkpoint.TrainState.fresh(model)
    state.step = int(best.name.rpartition("-")[2])
    checkpoint.save_best(copied / "checkpoint", state, kept)
    assert run(compose_once(words(tmp_path))) == copied
    axes = {"split": "test", "sequence_length": 32}
    of_best, _ = value(rows_of(copied, "perplexity"), "perplexity", **axes, checkpoint="best")
    of_final, _ = value(rows_of(copied, "perplexity"), "perplexity", **axes, checkpoint="final")
    # Without an embedding every symbol is as likely as any other.
    assert of_best == pytest.approx(kept.vocabulary_size)
    assert of_final == value(rows_of(finished, "perplexity"), "perplexity", **axes, checkpoint="final")[0]


def test_the_last_validation_and_the_evaluation_agree(finished):
    last = read_metrics(finished / "metrics.jsonl")[-1]
    rows = rows_of(finished, "perplexity")
    final, _ = value(rows, "nats_per_character", split="validation", checkpoint="final", sequence_length=32)
    assert final == pytest.approx(last["nats_per_character"], rel=1e-6)


@torch.no_grad()
def test_the_buckets_of_positions_add_up_to_the_split(folder, finished):
    rows = rows_of(finished, "perplexity")
    axes = {"split": "test", "checkpoint": "final", "sequence_length": 32}
    whole, count = value(rows, "nats_per_character", **axes)
    buckets = ["0-0", "1-1", "2-3", "4-7", "8-15", "16-31"]
    found = [value(rows, "nats_per_character", **axes, position_bucket=bucket) for bucket in buckets]
    # Of twice the length as well, which has one bucket more.
    assert len([row for row in rows if "position_bucket" in row.measurement.settings]) == 2 * len(buckets) + 1
    assert sum(samples for _, samples in found) == count
    assert sum(nats * samples for nats, samples in found) / count == pytest.approx(whole, rel=1e-6)
    model, _ = load_model(finished / "checkpoint" / "final")
    nats = nats_by_hand(model, prepare(compose_once(words(folder))).corpus.tokens["test"], 32)
    assert found[0][0] == pytest.approx(float(nats[::32].mean()), rel=1e-4)


def test_the_same_command_does_not_train_again_and_prints_the_table(folder, finished):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished.rglob("*") if path.is_file()}
    code, output, errors = run_here("train.py", *words(folder))
    assert code == 0, errors
    assert f"finished before, not trained again (rerun=true does): {finished}" in errors
    assert "Traceback" not in errors
    for path, (written, content) in before.items():
        if path.name != "train.log":
            assert (path.stat().st_mtime_ns, path.read_bytes()) == (written, content), path
    assert "text:small@" in output
    assert "softmax" in output
    axes = {"split": "test", "checkpoint": "best", "sequence_length": 32, "context": "full"}
    perplexity, _ = value(rows_of(finished, "perplexity"), "perplexity", **axes)
    assert f"{perplexity:.3g}" in output
    assert str(finished) in output


def test_a_rerun_trains_again_to_the_same_numbers(copied, tmp_path):
    first, metrics, weights = copied, without_clocks(copied), final_bytes(copied)
    (first / "results" / "perplexity-0123abcd.jsonl").write_text("of other settings")
    notes = [first / "results" / "notes.txt", first / "checkpoint" / "final.bak", first / "environment-notes.json"]
    for path in notes:
        path.write_text("the user's")
    before = written_at(first)
    assert run(compose_once(words(tmp_path, "rerun=true"))) == first
    assert written_at(first) > before
    assert without_clocks(first) == metrics
    assert final_bytes(first) == weights
    assert not (first / "results" / "perplexity-0123abcd.jsonl").exists()
    assert all(path.exists() for path in notes)


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished run, under the outputs and with the text of a folder that a test may damage."""
    write_text(tmp_path / "small.txt", seed=0)
    return Path(shutil.copytree(finished, tmp_path / "outputs" / "demo" / finished.name))


def written_at(run_folder: Path) -> int:
    """Time at which the final checkpoint was written."""
    return (run_folder / "checkpoint" / "final" / "state.json").stat().st_mtime_ns


def test_the_rows_of_a_finished_training_are_made_again_from_its_checkpoint(copied, tmp_path):
    [path] = (copied / "results").glob("training-*.jsonl")
    rows, before = read_results(path), written_at(copied)
    path.unlink()
    code, output, errors = run_here("train.py", *words(tmp_path))
    assert code == 0, errors
    again = read_results(path)
    assert f"{path}: made again from" in errors
    # Nobody kept how long the first step took.
    assert again == [row for row in rows if row.measurement.metric != "first_step_seconds"]
    assert len(again) < len(rows)
    assert "not measured" in output
    assert written_at(copied) == before


def test_the_speed_of_a_training_that_was_not_alone_is_not_made_up(folder, tmp_path):
    write_text(tmp_path / "small.txt", seed=0)
    settings = compose_once(words(tmp_path))
    jobs = language_model_job(prepare(replace(settings, evaluations=[]))).parts
    run_jobs(jobs, shares_device=True)
    path = jobs[0].results
    rows = read_results(path)
    assert not {row.measurement.metric for row in rows} & {"tokens_per_second", "train_seconds"}
    path.unlink()
    # Alone this time, which says nothing of back then.
    run_jobs(jobs, shares_device=False)
    assert read_results(path) == rows


@pytest.mark.parametrize(
    ("file", "how"), [("weights.safetensors", "torn"), ("state.json", "a folder"), ("config.json", "missing")]
)
def test_a_damaged_final_checkpoint_names_a_way_out_that_leads_out(how, file, finished, copied, tmp_path):
    final = copied / "checkpoint" / "final"
    content = (final / file).read_bytes()
    (final / file).unlink()
    if how == "torn":
        (final / file).write_bytes(content[: len(content) // 2])
    elif how == "a folder":
        (final / file).mkdir()
    shutil.rmtree(copied / "results")
    settings = compose_once(words(tmp_path))
    with pytest.raises(UserError) as caught:
        run(settings)
    message = str(caught.value)
    assert str(final / file) in message
    assert f"once {final} is removed, the command that trained it trains again" in message
    assert "the same command resumes" not in message
    shutil.rmtree(final)
    assert run(settings) == copied
    assert final_bytes(copied) == final_bytes(finished)


def test_altered_results_name_a_way_out_that_leads_out(copied, tmp_path):
    settings = compose_once(words(tmp_path))
    for evaluation in ("training", "perplexity"):
        [path] = (copied / "results").glob(f"{evaluation}-*.jsonl")
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b'"num_devices": 1', b'"num_devices": 2', 1))
        with pytest.raises(UserError, match="altered after it was written") as caught:
            run(settings)
        assert f"{path}: " in str(caught.value)
        assert "once it is removed, the command that made it makes it again" in str(caught.value)
        path.unlink()
        run(settings)
        assert {row.identity.num_devices for row in read_results(path)} == {1}


def test_an_evaluation_that_is_new_or_missing_runs_without_a_training(copied, tmp_path):
    before = written_at(copied)
    [path] = (copied / "results").glob("perplexity-*.jsonl")
    content = path.read_bytes()
    assert run(compose_once(words(tmp_path, "eval.perplexity.extrapolation=[]"))) == copied
    assert len(list((copied / "results").glob("perplexity-*.jsonl"))) == 2
    assert path.read_bytes() == content
    path.unlink()
    run(compose_once(words(tmp_path)))
    # The last line has the time at which the file was begun.
    assert path.read_bytes().splitlines()[:-1] == content.splitlines()[:-1]
    assert written_at(copied) == before


SAME = [
    *("train.log_interval_steps=3", "train.checkpoint_interval_seconds=5", "logger=offline", "rerun=true"),
    *("train.precision=float32", "train.compile=false", "device=auto", "attn.backend=torch", "match=none"),
    "eval.perplexity.extrapolation=[4]",
]
OTHER = [
    *("train.learning_rate=1e-3", "seed=1", "train.num_steps=13", "train.batch_size=2", "train.precision=bfloat16"),
    *("train.weight_decay=0", "train.validation_interval_steps=3", "attn.qk_norm=true", "attn.conv_size=2"),
    *("data.vocabulary_size=64", "data.test_fraction=0.06", "model.feed_forward_width=25", "attn=flash"),
]


@pytest.mark.parametrize("override", SAME)
def test_what_changes_no_number_changes_no_folder(override, folder):
    if override == "device=auto" and torch.cuda.is_available():
        pytest.skip("auto is the CUDA device here")
    assert prepare(compose_once(words(folder, override))).folder == prepare(compose_once(words(folder))).folder


def test_the_place_of_the_outputs_and_of_the_text_change_no_name(folder, tmp_path):
    write_text(tmp_path / "small.txt", seed=0)
    assert prepare(compose_once(words(tmp_path))).folder.name == prepare(compose_once(words(folder))).folder.name
    write_text(tmp_path / "small.txt", seed=1)
    assert prepare(compose_once(words(tmp_path))).folder.name != prepare(compose_once(words(folder))).folder.name


def test_what_changes_numbers_changes_the_folder(folder):
    names = [prepare(compose_once(words(folder, *override.split()))).folder.name for override in ["", *OTHER]]
    hashes = [name.rpartition("-")[2] for name in names]
    assert len(set(hashes)) == len(names)


def test_epochs_and_steps_of_equal_length_are_one_training(folder):
    epochs = prepare(compose_once(words(folder, "train.num_epochs=1", "train.num_steps=null")))
    steps = prepare(compose_once(words(folder, f"train.num_steps={epochs.num_steps}")))
    assert epochs.num_steps == (len(epochs.corpus.tokens["train"]) - 1) // 32 // 4
    assert epochs.folder == steps.folder


def test_an_option_at_its_neutral_value_changes_no_hash():
    one = {"train": {"rate": 0.1, "layers": [{"gate": True}]}}
    more = {"train": {"rate": 0.1, "clip": None, "layers": [{"gate": True, "norm": False}]}, "new": None}
    assert config_hash(more) == config_hash(one)
    assert config_hash({"train": {"rate": 0.1, "layers": [{"gate": True}], "size": 0}}) != config_hash(one)


def slow_words(folder: Path, *overrides: str) -> list[str]:
    """A training long enough to be stopped in the middle."""
    return words(
        folder, "train.num_steps=200", "train.validation_interval_steps=80", "train.log_interval_steps=5",
        *overrides, outputs="stopped",
    )  # fmt: skip


def stop_after(step: int, number: signal.Signals, overrides: Sequence[str], run_folder: Path) -> tuple[int, str]:
    """Starts a training, sends a signal once metrics.jsonl shows `step`: (exit code, standard error)."""
    process = subprocess.Popen(
        command(*overrides), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    metrics, deadline = run_folder / "metrics.jsonl", time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics)):
            process.send_signal(number)
            break
        time.sleep(0.002)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.slow
def test_a_run_stopped_again_and_again_ends_with_the_bits_of_one_never_stopped(folder):
    overrides = slow_words(folder)
    run_folder = prepare(compose_once(overrides)).folder

    code, stderr = stop_after(10, signal.SIGTERM, overrides, run_folder)
    assert code == 143, stderr
    assert "SIGTERM: saving, then stopping" in stderr
    assert stderr.count("the same command resumes it") == 1
    assert "Traceback" not in stderr
    stopped = stderr.partition("stopped at step ")[2].split()[0]
    assert not (run_folder / "checkpoint" / "final").exists()
    assert not (run_folder / "failed.txt").exists()

    # The second sitting must first come to a step that the first one did not log.
    code, stderr = stop_after(int(stopped) + 10, signal.SIGINT, overrides, run_folder)
    assert code == 130, stderr
    assert f"resumes at step {stopped} of 200" in stderr
    assert stderr.count("the same command resumes it") == 1
    assert "Traceback" not in stderr
    stopped = stderr.partition("stopped at step ")[2].split()[0]

    often = [*overrides, "train.checkpoint_interval_seconds=0"]
    code, stderr = stop_after(int(stopped) + 10, signal.SIGKILL, often, run_folder)
    assert code == -signal.SIGKILL, stderr
    assert f"resumes at step {stopped} of 200" in stderr

    done = call(*overrides)
    assert done.returncode == 0, done.stderr
    resumed_at = int(done.stderr.partition("resumes at step ")[2].split()[0])
    assert resumed_at > int(stopped)
    never_stopped = call(*overrides, f"outputs_dir={folder / 'never_stopped'}")
    assert never_stopped.returncode == 0, never_stopped.stderr
    other = folder / "never_stopped" / "demo" / run_folder.name
    assert without_clocks(run_folder) == without_clocks(other)
    assert final_bytes(run_folder) == final_bytes(other)
    assert {path.name for path in (run_folder / "checkpoint").iterdir()} == {
        path.name for path in (other / "checkpoint").iterdir()
    }
    # The intervals of the last half count, whichever sitting they are of.
    of = {row.measurement.metric: row.measurement for row in rows_of(run_folder, "training")}
    assert 80 * 4 * 32 <= (of["tokens_per_second"].num_samples or 0) <= 100 * 4 * 32


def test_a_signal_during_the_last_step_ends_the_command_too(folder, monkeypatch):
    def validate_and_stop(self, state, report, validate=Sitting.validate):
        validate(self, state, report)
        if state.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Sitting, "validate", validate_and_stop)
    settings = compose_once(words(folder, outputs="last_step"))
    with pytest.raises(Interrupted, match="the same command") as caught:
        run(settings)
    assert caught.value.exit_code == 143
    monkeypatch.undo()
    done = run(settings)
    assert read_metrics(done / "metrics.jsonl")[-1]["step"] == 12
    assert len(rows_of(done, "perplexity")) > 0


@pytest.mark.parametrize("attn", ["softmax", "gated_deltanet"])
def test_a_diverged_run_is_a_row_and_one_line_of_an_error(attn, folder, monkeypatch, capsys):
    given = words(folder, f"attn={attn}", "train.learning_rate=1e5", outputs="diverged")
    assert launched(monkeypatch, run, given) == 1
    [error] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert re.match(r"error: diverged by step \d+: .*a smaller train\.learning_rate", error)
    place = prepare(compose_once(given)).folder
    [row] = rows_of(place, "training")
    assert row.measurement.status == "diverged"
    assert row.measurement.value is None
    assert "diverged by step" in row.measurement.reason
    assert not checkpoint.is_final(place / "checkpoint")
    assert (place / "failed.txt").read_text().startswith("DivergedError: diverged by step")
    print_summary({place: []})
    assert "diverged" in capsys.readouterr().out


@pytest.mark.parametrize("rate", [30, 3000])
def test_a_rate_far_too_high_is_never_a_crash(rate, folder):
    settings = compose_once(words(folder, f"train.learning_rate={rate}", "train.log_interval_steps=5", outputs="high"))
    try:
        run(settings)
    except DivergedError:
        [row] = rows_of(prepare(settings).folder, "training")
        assert row.measurement.status == "diverged"
        return
    for row in rows_of(prepare(settings).folder, "perplexity"):
        assert row.measurement.value is not None or "nats a token" in row.measurement.reason


def test_a_sweep_goes_on_past_a_job_that_fails_and_lists_it(folder, tmp_path):
    # The two jobs at 100000 fail: the text is shorter than that.
    given = words(folder, "attn=softmax,flash", "seq_len=16,100000", "train.num_steps=4", outputs="sweep")
    code, table, errors = run_here("train.py", "-m", *given)
    assert code == 1, errors
    assert "Traceback" not in errors
    runs = sorted(path.name.rpartition("-")[0] for path in (folder / "sweep" / "demo").iterdir())
    assert runs == ["flash-tiny-T16-seed0", "softmax-tiny-T16-seed0"]
    assert errors.count("error: ") == 2
    _, _, listed = errors.partition("2 of 4 jobs failed:\n")
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    assert len(lines) == 2
    for line, attn in zip(lines, ["softmax", "flash"], strict=True):
        assert f"attn={attn}" in line
        assert "seq_len=100000" in line
        assert "small.txt" in line
    assert table.count("text:small@") == 1
    assert all(sum(name in line for line in table.splitlines()) >= 2 for name in ("softmax", "flash"))


def test_a_bad_file_is_one_line_and_no_folder(folder, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9 " * 200)
    code, output, errors = run_here("train.py", *words(tmp_path, f"data.path={bad}"))
    assert code == 1
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: ")
    assert str(bad) in errors
    assert output == ""
    assert list(tmp_path.iterdir()) == [bad]


def test_outputs_that_cannot_be_written_are_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"outputs_dir: .*file"):
        run(compose_once(words(folder, f"outputs_dir={tmp_path / 'file'}")))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ReturnsNoState", r"^attn=mine: forward returns one Tensor; return \(y, state\), with y of the input's shape"),
        ("LosesAPosition", r"^attn=mine: forward returns y of shape \(2, \d+, \d+\); it must be a tensor"),
        ("ForgetsAWeight", r"^attn=mine: blocks\.0\.mixer\.scale has no initial value"),
        ("SeesAheadBehindZero", r"^attn=mine: position 0 sees position 1: "),
        ("DropsAtRandom", r"^attn=mine: two passes over one input differ by \S+; remove random numbers"),
        ("HasNoStateYet", r"^init_state .* \(NotImplementedError: no decoding yet\); .* trains_only = frozenset"),
    ],
)
def test_what_a_mixer_from_outside_cannot_be_is_said_before_it_is_trained(kind, message, folder, tmp_path):
    settings = replace(compose_once(words(folder, outputs=str(tmp_path))), evaluations=[], **settings_of(kind))
    with pytest.raises(UserError, match=message):
        run(settings)
    assert not list(tmp_path.rglob("checkpoint"))


@pytest.mark.parametrize("kind", ["BeginsAtZero", "RaisesAtOddLengths"])
def test_a_mixer_that_begins_at_zero_or_takes_some_lengths_alone_is_trained(kind, folder, tmp_path, caplog):
    caplog.set_level("WARNING", logger="attnbench")
    settings = replace(compose_once(words(folder, outputs=str(tmp_path))), evaluations=[], **settings_of(kind))
    trained = run(settings)
    assert rows_of(trained, "training")
    assert ("no sample of its text" in caplog.text) == (kind == "RaisesAtOddLengths")


def test_a_mixer_from_outside_that_sees_the_future_is_not_trained(folder, tmp_path, monkeypatch):
    settings = replace(
        compose_once(words(folder, outputs=str(tmp_path))), evaluations=[], **settings_of("SeesOneAhead")
    )
    with pytest.raises(UserError, match=r"^attn=mine: position 0 sees position 1: 1\.0e\+00 of .*it is not trained"):
        run(settings)
    assert not prepare(settings).checkpoints.exists()
    right = run(replace(settings, **settings_of("SeparateProjections")))
    assert rows_of(right, "training")
    # It costs seconds, once: what goes on from a checkpoint was looked at.
    looked = []
    monkeypatch.setattr("attnbench.mixers.causality.seen_of_the_future", lambda *_: looked.append(1) or "")
    run(replace(settings, seed=1, **settings_of("SeparateProjections")))
    assert looked == [1] * settings.model.num_layers
    monkeypatch.setattr(checkpoint, "load_last", lambda folder, model: TrainState.fresh(model))
    run(replace(settings, seed=2, **settings_of("SeparateProjections")))
    assert len(looked) == settings.model.num_layers


def test_the_table_has_every_variant_and_never_two_corpora(folder, finished, tmp_path, capsys):
    write_text(tmp_path / "small.txt", seed=1)
    flash = run(compose_once(words(folder, "attn=flash")))
    elsewhere = run(compose_once(words(tmp_path)))
    capsys.readouterr()
    swept = {finished: ["attn=softmax", "train.warmup_steps=2"], flash: ["attn=flash", "train.warmup_steps=3"]}
    print_summary({**swept, elsewhere: []})
    printed = capsys.readouterr().out
    tables = printed.split("text:small@")[1:]
    assert len({table.split()[0] for table in tables}) == len(tables) == 2
    assert [[name in table for name in ("softmax warmup_steps=2", "flash warmup_steps=3")] for table in tables] == [
        [True, True],
        [False, False],
    ]
    for place in (finished, flash, elsewhere):
        assert str(place) in printed


def test_an_evaluation_made_later_has_the_environment_that_made_it(copied, tmp_path, monkeypatch):
    first = copied
    next(first.glob("results/perplexity-*")).unlink()
    trained = json.loads((first / "environment.json").read_text())
    monkeypatch.setattr("attnbench.machine.environment.source_commit", lambda root: ("another-one", False))
    assert run(compose_once(words(tmp_path))) == first
    [path] = (first / "results").glob("perplexity-*.jsonl")
    identity = read_results(path)[0].identity
    assert identity.commit == "another-one"
    stamp = json.loads((first / f"environment-{identity.environment}.json").read_text())
    assert stamp == {**trained, "commit": "another-one", "dirty": False}
    assert json.loads((first / "environment.json").read_text()) == trained


def test_a_run_that_failed_has_failed_in_wandb_too(tmp_path, monkeypatch):
    write_text(tmp_path / "small.txt", seed=0)
    codes = []
    monkeypatch.setattr("attnbench.training.run.WandbMirror.close", lambda self, exit_code=0: codes.append(exit_code))
    run(replace(compose_once(words(tmp_path)), evaluations=[]))
    with pytest.raises(UserError, match="diverged"):
        run(compose_once(words(tmp_path, "train.learning_rate=1e30")))
    assert codes == [0, 1]
