"""What times and weighs: its rows are complete and plausible, and what does not fit leaves the next setting clean."""

import gc
import math
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from probe_settings import evaluation_class, smoke
from runs import SETTINGS
from small import compose_once

from attnbench.cli.compose import CONF
from attnbench.evals import throughput
from attnbench.evals.lib import step_cost
from attnbench.evals.lib.rows import doublings
from attnbench.evals.lib.size_losses import SizeTraining
from attnbench.evals.memory import growth
from attnbench.evals.throughput import UNITS, Throughput
from attnbench.machine.memory import available_mib
from attnbench.machine.timing import CappedChild, OutOfMemory
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import UNCOUNTED
from attnbench.settings.schema import SELECTION_SEED
from attnbench.training import step as training_step
from attnbench.training.job import Run
from attnbench.training.prepare import prepare

ON_LINUX = pytest.mark.skipif(available_mib() is None, reason="only Linux counts and caps a process's memory")


def subject(text: Path, *overrides: str) -> Run:
    return prepare(compose_once([*SETTINGS, f"data.path={text}", *overrides]))


def options(name: str, **changes: object) -> dict:
    """The smoke settings of an evaluation, over those of its yaml."""
    [settings] = compose_once(["experiment=demo", "device=cpu", f"eval=[{name}]"]).evaluations
    return {**settings.options, **smoke(name), **changes}


def rows_of(name: str, measured: Run, **changes: object) -> list:
    evaluation: Any = evaluation_class(name)
    return list(evaluation(**options(name, **changes)).run(measured))


def values(rows: list, settings: dict) -> dict:
    return {row.metric: row.value for row in rows if row.settings == settings}


def test_throughput_has_every_metric_and_they_agree(text):
    measured = subject(text)
    rows = rows_of("throughput", measured, lengths=[16, 32], batch_size=2, constant_tokens=64, max_length=64)
    pairs = [(16, 2), (32, 2), (16, 4), (64, 1)]
    assert [(row.metric, tuple(row.settings.values())) for row in rows] == [
        (metric, pair) for pair in pairs for metric in UNITS
    ]
    assert all(row.status == "ok" and row.unit == UNITS[row.metric] for row in rows if row.metric in UNITS)
    model: Any = measured.new_model()
    for length, batch_size in pairs:
        found = values(rows, {"sequence_length": length, "batch_size": batch_size})
        seconds = found["step_milliseconds"] / 1e3
        assert math.isclose(found["tokens_per_second"] * seconds, length * batch_size)
        assert math.isclose(found["achieved_tflops"] * 1e12 * seconds, 3 * model.forward_flops(length) * batch_size)
        assert found["first_step_seconds"] > 0
        # Nothing more is held than before where other tests of this process have freed as much.
        assert 0 <= found["peak_memory_mib"] < 200
    ceilings = {
        found["achieved_tflops"] / found["ceiling_fraction"]
        for found in (values(rows, {"sequence_length": a, "batch_size": b}) for a, b in pairs)
    }
    assert max(ceilings) == pytest.approx(min(ceilings))
    [step] = [row for row in rows if row.metric == "step_milliseconds" and row.settings["sequence_length"] == 64]
    assert step.low <= step.value <= step.high
    assert step.num_samples >= 3


def test_a_mixer_whose_operations_nobody_counts_has_its_speed_alone(text, monkeypatch):
    measured = subject(text)
    monkeypatch.setattr(LanguageModel, "forward_flops", lambda *_: None)
    rows = rows_of("throughput", measured, lengths=[16], batch_size=2, constant_tokens=None, max_length=16)
    assert [row.metric for row in rows] == list(UNITS)
    uncounted = {row.metric: row.reason for row in rows if row.status == "unsupported"}
    assert uncounted == dict.fromkeys(("achieved_tflops", "ceiling_fraction"), UNCOUNTED)


def test_throughput_times_the_step_that_trains_on_new_text_at_every_call(text, monkeypatch):
    seen, train_step = [], training_step.train_step

    def watched(state, batch, rate, settings, precision, *compiled):
        seen.append((batch.tokens_BT.clone(), float(rate), settings, precision))
        return train_step(state, batch, rate, settings, precision, *compiled)

    monkeypatch.setattr(training_step, "train_step", watched)
    measured = subject(text)
    how = {"warmup": 2, "repeats": 4, "max_seconds": 60.0}
    rows_of("throughput", measured, lengths=[32], batch_size=2, constant_tokens=None, **how)
    _settling, *steps = seen
    assert len(steps) == 1 + 2 + 4
    assert all(tokens_BT.shape == (2, 32) for tokens_BT, *_ in steps)
    assert len({tuple(tokens_BT.flatten().tolist()) for tokens_BT, *_ in steps}) == len(steps)
    assert all(rate > 0 and (*rest,) == (measured.train, "float32") for _, rate, *rest in steps)


def test_a_first_step_that_is_shown_finds_nothing_compiled_and_one_that_is_not_may(text, monkeypatch):
    colds, cold_compiler = [], step_cost._cold_compiler
    monkeypatch.setattr(step_cost, "_cold_compiler", lambda is_cold: colds.append(is_cold) or cold_compiler(False))
    # Nothing is compiled here in truth, which would take a minute.
    monkeypatch.setattr(step_cost, "load_compiler", lambda device: None)
    stepper = step_cost.stepper
    monkeypatch.setattr(step_cost, "stepper", lambda *given, compiled, captured: stepper(*given))
    measured = subject(text, "train.compile=true")
    rows_of("throughput", measured, lengths=[16], constant_tokens=None)
    assert colds == [True]
    rows = rows_of("scaling", measured, names=["tiny"])
    assert "first_step_seconds" not in {row.metric for row in rows}
    assert colds == [True, False]


def test_one_length_more_changes_no_other_setting(text):
    few = Throughput(**options("throughput", lengths=[16, 32], constant_tokens=64)).pairs
    more = Throughput(**options("throughput", lengths=[16, 32, 64], constant_tokens=64, max_length=64)).pairs
    assert set(few) < set(more)
    # As published, and no setting twice.
    [settings] = compose_once(["experiment=demo", "device=cpu", "eval=[throughput]"]).evaluations
    pairs = Throughput(**settings.options).pairs
    assert pairs[:3] == [(256, 128), (512, 128), (1024, 128)]
    assert pairs[3:] == [(length, 32768 // length) for length in doublings(512, 32768)]


def test_a_text_too_short_for_a_length_is_rows_that_say_so(text):
    rows = rows_of("throughput", subject(text), lengths=[16, 2**15], batch_size=2, constant_tokens=None)
    assert [row.status for row in rows] == ["ok"] * len(UNITS) + ["unsupported"] * len(UNITS)
    assert all("characters and a batch needs 65537" in row.reason for row in rows[len(UNITS) :])


@ON_LINUX
def test_a_step_that_does_not_fit_is_rows_and_the_next_one_is_clean(text, monkeypatch):
    # Each head's weights alone are 4 x 2048 x 2048 numbers, 64 MiB: more than the heap keeps of other tests.
    monkeypatch.setattr("attnbench.evals.lib.step_cost.available_mib", lambda: 100.0)
    measured = subject(text)
    rows = rows_of("throughput", measured, lengths=[64, 2048, 32], batch_size=4, constant_tokens=None)
    assert [row.status for row in rows] == [
        *["ok"] * len(UNITS),
        *["out_of_memory"] * len(UNITS),
        *["ok"] * len(UNITS),
    ]
    assert all("can't allocate memory" in row.reason for row in rows if row.status == "out_of_memory")
    after = values(rows, {"sequence_length": 32, "batch_size": 4})["peak_memory_mib"]
    assert after < values(rows, {"sequence_length": 64, "batch_size": 4})["peak_memory_mib"] + 8


@pytest.mark.slow
@ON_LINUX
def test_memory_grows_as_the_square_for_softmax_until_it_does_not_fit(text):
    lengths = {"min_length": 128, "cpu_max_length": 1024, "batch_size": 8, "cpu_cap_mib": 220}
    rows = rows_of("memory", subject(text), **lengths)
    for metric, last in (("forward_peak_mib", "ok"), ("training_peak_mib", "out_of_memory")):
        of_mode = [row for row in rows if row.metric == metric]
        assert [row.settings["sequence_length"] for row in of_mode] == [128, 256, 512, 1024]
        assert [row.status for row in of_mode] == ["ok"] * 3 + [last]
        # Two heads' weights, 8 x 2 x 512 x 512 numbers of 4 bytes, once at least.
        assert 16 < of_mode[2].value < 220
    assert "capped at 220 MiB" in of_mode[3].reason
    exponents = {row.settings["mode"]: row for row in rows if row.metric == "growth_exponent"}
    assert set(exponents) == {"forward", "training"}
    assert all(1.3 < row.value < 2.1 and row.low <= row.value <= row.high for row in exponents.values())
    states = [row.value for row in rows if row.metric == "state_bytes"]
    # A key and a value of 32 channels in float32 at every position of 2 layers.
    assert [after - before for before, after in pairwise(states)] == [
        length * 2 * 32 * 4 * 2 for length in (128, 256, 512)
    ]


def test_what_is_longer_than_what_did_not_fit_is_not_tried(text, monkeypatch):
    asked = []

    def ask(self, mode, length):
        asked.append((mode, length))
        return OutOfMemory(reason="too large") if (mode, length) == ("forward", 64) else length**2 / 1000

    monkeypatch.setattr(CappedChild, "ask", ask)
    rows = rows_of("memory", subject(text), min_length=32, cpu_max_length=256)
    assert asked == [("forward", 32), ("forward", 64), *(("training", length) for length in (32, 64, 128, 256))]
    forward = [row for row in rows if row.metric == "forward_peak_mib"]
    assert [row.status for row in forward] == ["ok"] + ["out_of_memory"] * 3
    assert [row.reason for row in forward] == ["", "too large", "did not fit at 64", "did not fit at 64"]
    short, training = (row for row in rows if row.metric == "growth_exponent")
    assert short.status == "unsupported"
    assert training.value == pytest.approx(2)


def test_a_system_that_does_not_tell_has_rows_that_say_so(text, monkeypatch):
    monkeypatch.setattr(CappedChild, "ask", lambda self, mode, length: None)
    rows = [row for row in rows_of("memory", subject(text)) if row.metric.endswith("_mib")]
    assert len(rows) == 6
    assert all(row.status == "unsupported" and "does not say" in row.reason for row in rows)


@pytest.mark.slow
@ON_LINUX
def test_a_layer_without_a_state_has_its_peaks_weighed_all_the_same(text):
    rows = rows_of("memory", subject(text, "attn=module", "attn.path=outside_layers:Tutorial"))
    states = [row for row in rows if row.metric == "state_bytes"]
    assert [row.settings["sequence_length"] for row in states] == [32, 64, 128]
    assert {(row.status, row.reason) for row in states} == {
        ("unsupported", "backend torch only trains: it takes no state")
    }
    peaks = [row for row in rows if row.metric.endswith("_mib")]
    assert len(peaks) == 6
    assert all(row.status == "ok" and row.value is not None for row in peaks)


@pytest.mark.slow
@ON_LINUX
def test_memory_grows_as_the_length_for_linear_attention(text):
    # So many sequences that what the heap keeps of earlier tests does not show.
    lengths = {"min_length": 128, "cpu_max_length": 512, "batch_size": 40}
    rows = rows_of("memory", subject(text, "attn=linear"), **lengths)
    assert all(row.status == "ok" for row in rows)
    exponents = [row.value for row in rows if row.metric == "growth_exponent"]
    assert len(exponents) == 2
    # Of a square it would be near 2.
    assert all(0.8 < exponent < 1.3 for exponent in exponents), exponents
    peaks = {metric: [row.value for row in rows if row.metric == metric] for metric in {row.metric for row in rows}}
    assert all(t > f for f, t in zip(peaks["forward_peak_mib"], peaks["training_peak_mib"], strict=True))
    assert len(set(peaks["state_bytes"])) == 1


def test_growth_is_the_slope_of_the_upper_half():
    peaks = {length: max(100.0, length**2 / 1000) for length in doublings(64, 8192)}
    row: Any = growth(peaks, {"mode": "forward"})
    assert row.value == pytest.approx(2)
    assert row.num_samples == 4
    assert row.low <= row.value <= row.high
    assert growth({256: 1.0, 512: 2.0}, {}).status == "unsupported"


@pytest.mark.slow
@ON_LINUX
def test_a_child_ended_by_the_system_did_not_fit_and_the_next_one_answers():
    kill, answer = f"__import__('signal').raise_signal({signal.SIGKILL})", "6 * 7"
    with CappedChild(partial(partial, eval), 64) as child:
        outcome = child.ask(kill)
        assert isinstance(outcome, OutOfMemory)
        assert "SIGKILL" in outcome.reason
        assert child.ask(answer) == 42
        with pytest.raises(RuntimeError, match="exit code 3"):
            child.ask("__import__('os')._exit(3)")


SIZES = {
    name: {"name": name, "dim": width, "num_layers": 2, "head_width": 16, "feed_forward_width": width}
    for name, width in {"s": 16, "m": 32, "l": 48}.items()
}


def test_scaling_measures_and_trains_every_size_at_a_rate_of_its_own(text, monkeypatch):
    trainings = []

    def remembered(self, rate, seed, split, train_one=SizeTraining.train):
        trained = train_one(self, rate, seed, split)
        trainings.append((self.size.name, rate, seed, split, trained.nats))
        return trained

    monkeypatch.setattr(SizeTraining, "train", remembered)
    rates, measured = [1e-5, 1e-2], subject(text)
    rows = rows_of(
        "scaling", measured, sizes=SIZES, names=["s", "m"], batch_size=4, train_tokens=2048, learning_rates=rates
    )
    metrics = ("parameters", "step_milliseconds", "peak_memory_mib", "non_embedding_parameters", "nats_per_character")
    assert [(row.metric, row.settings["model"]) for row in rows] == [
        (metric, name) for name in ("s", "m") for metric in metrics
    ]
    assert {row.status for row in rows} == {"ok"}
    for name in ("s", "m"):
        of_size = {row.metric: row for row in rows if row.settings.get("model") == name}
        embedding = measured.corpus.vocabulary_size * SIZES[name]["dim"]
        assert of_size["non_embedding_parameters"].value == of_size["parameters"].value - embedding
        searched = [one for one in trainings if one[0] == name and one[3] == "validation"]
        assert [one[1:3] for one in searched] == [(rate, SELECTION_SEED) for rate in rates]
        loss, scored = of_size["nats_per_character"], [one for one in trainings if one[0] == name and one[3] == "test"]
        assert loss.settings["learning_rate"] == min(searched, key=lambda one: one[4])[1] == 1e-2
        assert [one[1:3] for one in scored] == [(1e-2, 0), (1e-2, 1)]
        assert scored[0][4] != scored[1][4]
        assert loss.value == pytest.approx(mean(one[4] for one in scored))
        assert loss.low < loss.value < loss.high


def test_one_size_more_changes_no_other_loss(text):
    def losses(*names):
        rows = rows_of("scaling", subject(text), sizes=SIZES, names=[*names], batch_size=4, train_tokens=512)
        return {row.settings["model"]: row.value for row in rows if row.metric == "nats_per_character"}

    assert losses("m").items() < losses("s", "m").items()


def test_a_size_that_cannot_be_matched_is_rows_that_say_so(text):
    impossible = {**SIZES, "odd": {**SIZES["m"], "name": "odd", "head_width": 20}}
    rows = rows_of("scaling", subject(text), sizes=impossible, names=["odd", "s"], batch_size=2)
    assert [row.status for row in rows] == ["unsupported"] * 3 + ["ok"] * 3
    assert "head_width=20" in rows[0].reason


def test_a_training_that_diverges_has_no_loss(text):
    rows = rows_of(
        "scaling", subject(text), sizes=SIZES, names=["s"], batch_size=4, train_tokens=4096,
        learning_rates=[1e30], warmup_steps=0,
    )  # fmt: skip
    [loss] = [row for row in rows if row.metric == "nats_per_character"]
    assert loss.status == "diverged"


def test_the_sizes_are_those_of_conf_model():
    sizes = options("scaling")["sizes"]
    models = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "model").glob("*.yaml")}
    # A size more would give every measurement of scaling another hash.
    assert sizes == {name: size for name, size in models.items() if name != "85m"}


@pytest.mark.gpu
def test_a_step_that_does_not_fit_the_gpu_gives_its_memory_back(text):
    device = torch.device("cuda", 0)
    measured = subject(text, "device=cuda:0", "train.compile=false")
    two_gib = 2**31 / torch.cuda.get_device_properties(device).total_memory
    # What stays of it is cuBLAS's own.
    rows_of("throughput", measured, lengths=[64], batch_size=4, constant_tokens=None)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(two_gib, device)
    try:
        rows = rows_of("throughput", measured, lengths=[64, 4096, 128], batch_size=8, constant_tokens=None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert [row.status for row in rows] == [
        *["ok"] * len(UNITS),
        *["out_of_memory"] * len(UNITS),
        *["ok"] * len(UNITS),
    ]
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before + 2**21
    assert throughput.UNITS.keys() == {row.metric for row in rows}


@pytest.mark.gpu
def test_memory_on_a_gpu_grows_as_the_mixer_does(text):
    lengths = {"min_length": 128, "max_length": 2048, "batch_size": 8}
    for attn, low, high in (("softmax", 1.3, 2.1), ("linear", 0.85, 1.15)):
        rows = rows_of("memory", subject(text, "device=cuda:0", f"attn={attn}", "attn.backend=torch"), **lengths)
        assert all(row.status == "ok" for row in rows)
        assert all(low < row.value < high for row in rows if row.metric == "growth_exponent")
