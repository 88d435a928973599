"""bench=decode: wrong steps fail and are not timed, split is held against whole, eager against captured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from benches import CPU, ONCE, bench_options
from small import MIXERS, mixer_settings, one_an_operator

from attnbench.bench.decode import DecodeBench
from attnbench.bench.operators import decoding, generation, language_models
from attnbench.bench.operators.roofline import Work
from attnbench.bench.operators.steps import STEPS, CacheShape
from attnbench.mixers.flash import Flash
from attnbench.results.row_tables import read_csv
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.registry import build
from attnbench.settings.schema import ModelSettings

SHAPE = CacheShape(head_width=16, cache_length=65, batch_size=2, num_heads=4, num_key_value_heads=2)
SIZE = ModelSettings(name="bench", dim=32, num_layers=2, head_width=16, feed_forward_width=64)
SOME_OF_EACH = [
    *("bench=decode", "bench.head_widths=[64,80]", "bench.cache_lengths=[2050]", "bench.batch_sizes=[2]"),
    *("bench.texts=[[40,2]]", "bench.text_repeats=2", "bench.contexts=[300]"),
]
"""On a GPU: some of each table."""
ON_A_CPU = ("textbook", "sdpa_flash", "linear", "gated_deltanet")


def measured(*names: str, shape: CacheShape = SHAPE, precision: str = "float32") -> list[Measurement]:
    conditions = replace(CPU, precision=precision)
    return list(decoding.measure_steps(shape, names, ONCE, {"table": "position"}, conditions))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_a_step_that_runs_on_a_cpu_passes_the_gate(precision, num_key_value_heads):
    shape = replace(SHAPE, num_key_value_heads=num_key_value_heads)
    rows = measured(*ON_A_CPU, shape=shape, precision=precision)
    assert [(row.metric, row.settings["implementation"], row.status) for row in rows] == [
        (metric, STEPS[name].label("cpu", "float32", 16), "ok")
        for name in ON_A_CPU
        for metric in ("max_error", "decode_milliseconds", "roofline_fraction")
    ]


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_step_that_is_wrong_is_failed_and_not_timed(name, monkeypatch):
    right = STEPS[name]

    def prepare(example):
        call = right.prepare(example)

        def wrong():
            y = call().clone()
            y.view(-1)[-1] += 1.0
            return y

        return wrong

    monkeypatch.setitem(STEPS, name, replace(right, prepare=prepare))
    row, error = measured(name)
    assert (row.metric, row.value, row.status) == ("decode_milliseconds", None, "failed")
    assert (error.metric, error.status) == ("max_error", "failed")
    assert "output is off by" in row.reason


def test_a_state_s_step_stands_under_the_name_of_its_kernel():
    labels = [STEPS["linear"].label("cuda", "bfloat16", width) for width in (128, 192)]
    assert labels == ["linear (triton)", "linear (torch)"]
    labels = [STEPS["gated_deltanet"].label("cuda", "bfloat16", width) for width in (64, 80, 128, 192, 256)]
    assert [name.partition(" ")[2] for name in labels] == ["(triton)", "(torch)", "(triton)", "(torch)", "(triton)"]
    assert STEPS["gated_deltanet"].label("cuda", "float32", 256) == "gated_deltanet (torch)"
    assert STEPS["triton_split"].label("cuda", "bfloat16", 80) == "triton_split"


def test_the_roofline_reads_the_cache_once():
    assert STEPS["triton_split"].work(SHAPE, 2) == Work(4 * 2 * 65 * 4 * 16, 2 * 2 * 65 * 2 * 16 * 2)
    assert STEPS["linear"].work(SHAPE, 2).num_bytes == 2 * 4 * (2 * 4 * 16 * 16)


def candidate(name: str) -> language_models.Candidate:
    return language_models.Candidate(
        mixer=mixer_settings(name), size=SIZE, vocabulary_size=32, length=1, conditions=CPU
    )


TOO_WIDE = ("rwkv7", "mamba2", "mamba3")
"""At this size no feed-forward is narrow enough for these to have softmax's parameters."""


@pytest.mark.parametrize("name", one_an_operator([name for name in MIXERS if name not in TOO_WIDE]))
def test_a_model_writes_texts_and_tokens_behind_others(name):
    eager, rate, error, captured = generation.measure_text(candidate(name), 12, 2, 2, {"table": "text"})
    assert (rate.metric, rate.settings["form"]) == ("tokens_per_second", "eager")
    assert rate.value == pytest.approx(24 / (eager.value or 1))
    assert (error.metric, error.status) == ("max_error", "ok")
    assert (eager.metric, eager.status, eager.num_samples) == ("eager_seconds", "ok", 2)
    assert (captured.metric, captured.status) == ("captured_seconds", "unsupported")
    error, step = generation.measure_context(candidate(name), 16, 1, ONCE, {"table": "context"})
    assert (error.metric, error.status) == ("max_error", "ok")
    assert (step.metric, step.status) == ("decode_milliseconds", "ok")
    assert step.settings["implementation"].startswith(name)


def test_a_model_whose_steps_are_wrong_is_failed(monkeypatch):
    monkeypatch.setattr(Flash, "mix_newest", lambda self, query_BTHK, *rest: query_BTHK)
    eager, _ = generation.measure_text(candidate("flash"), 12, 2, 2, {})
    (step,) = generation.measure_context(candidate("flash"), 16, 1, ONCE, {})
    for row in (eager, step):
        assert row.status == "failed"
        assert "its steps' logits are off by" in row.reason


@pytest.mark.parametrize(("seconds", "faster"), [((6.0, 2.0), 200.0), ((2.0, 4.0), -50.0)])
def test_a_captured_step_is_faster_or_slower_by_percent(seconds, faster, monkeypatch):
    times = dict(zip((generation.EAGER, generation.CAPTURED), seconds, strict=True))

    def write(candidate, metric, num_tokens, batch_size, repeats, settings):
        return [Measurement(metric=metric, value=times[metric], unit="s", settings=settings)]

    monkeypatch.setattr(generation, "_time_text", write)
    on_cuda = SimpleNamespace(conditions=SimpleNamespace(device=torch.device("cuda")), label="mine")
    *_, row = generation.measure_text(on_cuda, 12, 2, 2, {})  # pyright: ignore[reportArgumentType]
    assert (row.metric, row.value, row.unit) == ("captured_faster_percent", faster, "%")


@pytest.mark.parametrize(
    ("changes", "precision", "num_rows", "reason"),
    [
        ({"mixers": [["flash", "triton"]], "implementations": ["triton_split"]}, "float32", 2 + 2 + 2, ""),
        ({"implementations": []}, "float16", 2 * (2 + 2), "precision=float16: models compute in float32, tf32, bfl"),
    ],
)
def test_a_backend_or_precision_that_cannot_run_here_is_rows_that_say_so(changes, precision, num_rows, reason):
    bench = DecodeBench(**bench_options("decode", **changes))
    rows = [row for cell in bench.cells() for row in bench.measure(cell, replace(CPU, precision=precision))]
    assert len(rows) == num_rows
    assert all(row.status == "unsupported" and row.reason and reason in row.reason for row in rows)


BAD = {
    "bench.num_key_value_heads=5": ["bench.num_key_value_heads=5", "must divide bench.num_heads=4"],
    "bench.num_key_value_heads=0": ["bench.num_key_value_heads=0", "must divide"],
    "bench.mixers=[flash]": ["bench.mixers=['flash']", "backend"],
    "bench.texts=[[8]]": ["bench.texts=[[8]]", "[tokens, sequences]"],
    "bench.texts=[[0,1]]": ["bench.texts=[0, 1]", "at least 1"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_setting_is_one_line(override):
    name, _, value = override.partition("=")
    options = bench_options("decode", **{name.removeprefix("bench."): yaml.safe_load(value)})
    with pytest.raises(UserError) as caught:
        build("attnbench.bench.decode.DecodeBench", options, DecodeBench, group="bench")
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in BAD[override]), caught.value


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_on_a_gpu_nothing_of_ours_fails(precision, run_benchmark, tmp_path):
    run_benchmark(*SOME_OF_EACH, f"precision={precision}", f"outputs_dir={tmp_path}")
    (folder,) = (tmp_path / "benchmark" / "decode").iterdir()
    rows = read_csv(folder / "results.csv")
    libraries = {"sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash_attn_whole", "flash_attn_split"}
    assert {row.identity.variant for row in rows if row.measurement.status == "failed"} <= libraries
    measured_ones = {row.identity.variant for row in rows if row.measurement.status == "ok"}
    assert {"textbook", "triton_whole", "triton_split"} <= measured_ones
    # Our kernels of recurrent states take no float16: there torch's form is measured, where it is what auto chooses.
    ours = {"gated_deltanet (torch)"} if precision == "float16" else {"flash (triton)", "gated_deltanet (triton)"}
    assert ours <= measured_ones
