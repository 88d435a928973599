"""bench=profile: its files and rows, its refusals, and implementations that are wrong or too large."""

import csv
import gzip
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from benches import CPU, ONCE, bench_options
from small import MODEL, PROFILED, VOCABULARY, small_model

from attnbench.bench import run
from attnbench.bench.operators.gate import GateError
from attnbench.bench.page import print_tables
from attnbench.bench.profile import ProfileBench
from attnbench.bench.profiling import attention as profile_attention
from attnbench.bench.profiling import step as profile_step
from attnbench.bench.profiling.parts import IDLE, PARTS
from attnbench.bench.profiling.recording import Recording
from attnbench.bench.tables import tables
from attnbench.report.page import write_report
from attnbench.results.row_tables import read_csv
from attnbench.settings.errors import UserError
from attnbench.settings.registry import build
from attnbench.settings.schema import BenchSettings
from attnbench.training.step import train_step


class OutOfResourcesError(Exception):
    """As Triton's, which is neither a RuntimeError nor a ValueError."""


OPTIONS = bench_options("profile")
TARGET = f"{ProfileBench.__module__}.{ProfileBench.__name__}"


def measure(folder: Path, precision: str = "auto", **options) -> tuple[Path, list]:
    settings = BenchSettings(
        name="profile", target=TARGET, options=OPTIONS | options, precision=precision, device="cpu",
        outputs_dir=str(folder), rerun=False, command="attnbench bench bench=profile",
    )  # fmt: skip
    ran = run.run_bench(settings, lambda names: CPU.mixers(names or []))
    print_tables([ran])
    return ran, read_csv(ran / "results.csv")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("outputs"))


def values(rows, variant: str, metric: str) -> dict:
    return {
        next((row.measurement.settings[name] for name in ("operator", "part", "pass") if name in settings), ""): value
        for row in rows
        if (row.identity.variant, row.measurement.metric) == (variant, metric)
        for settings, value in [(row.measurement.settings, row.measurement.value)]
    }


@pytest.mark.parametrize("mixer", PROFILED)
def test_the_parts_of_a_step_are_its_whole(ran, mixer):
    _, rows = ran
    shares = values(rows, mixer, "part_share")
    assert list(shares) == [*PARTS, IDLE]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(shares[part] > 0 for part in PARTS)
    parts, passes = (values(rows, mixer, f"{name}_milliseconds") for name in ("part", "pass"))
    # What has no pass has no part either.
    assert sum(passes.values()) <= sum(parts.values()) * 1.0001
    assert sum(passes.values()) >= (sum(parts.values()) - parts["other"]) * 0.9999
    assert passes["optimizer"] == pytest.approx(parts["optimizer"])
    assert all(value > 0 for value in passes.values())


def test_attention_comes_with_its_operators_and_the_ratio(ran):
    _, rows = ran
    totals = {name: values(rows, name, "profiled_milliseconds")[""] for name in ("textbook", "sdpa_flash")}
    assert values(rows, "sdpa_flash", "speedup")[""] == pytest.approx(totals["textbook"] / totals["sdpa_flash"])
    for name, total in totals.items():
        operators = values(rows, name, "operator_milliseconds")
        assert len(operators) == OPTIONS["num_operators"] + 1
        assert sum(operators.values()) == pytest.approx(total)
    # Two products of 16 heads, 32 positions squared and 32 channels, in two calls: by the profiler's count and by ours.
    flops = 2 * 2 * 2 * 16 * 32**2 * 32 / 1e6
    assert values(rows, "textbook", "operator_mflops")["aten::bmm"] == pytest.approx(flops)
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert values(rows, "sdpa_flash", "operator_mflops")[fused] == pytest.approx(flops)
    refused = [row.measurement for row in rows if row.identity.variant == "triton"]
    assert {row.status for row in refused} == {"unsupported"}
    assert all("need CUDA" in row.reason for row in refused)


def test_a_trace_of_every_step_has_its_labels(ran):
    folder, _ = ran
    names = {path.name for path in folder.glob("traces/*")}
    assert names == {"attention-textbook.json.gz", "attention-sdpa_flash.json.gz"} | {
        f"{mixer}-T16-eager.json.gz" for mixer in PROFILED
    }
    for mixer in PROFILED:
        trace = json.loads(gzip.decompress((folder / "traces" / f"{mixer}-T16-eager.json.gz").read_bytes()))
        labels = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert labels == {"forward", "backward", *PARTS} - {"other"}


def test_the_summary_has_a_line_for_every_whole_pass_part_and_operator(ran):
    folder, rows = ran
    lines = list(csv.DictReader(io.StringIO((folder / "summary.csv").read_text())))
    counts = Counter((line["implementation"], line["kind"]) for line in lines)
    assert {name for name, _ in counts} == {"textbook", "sdpa_flash", *PROFILED}
    for mixer in PROFILED:
        lines_of = {"whole": 1, "pass": 3, "part": len(PARTS) + 1, "operator": OPTIONS["num_step_operators"] + 1}
        assert {kind: counts[mixer, kind] for kind in lines_of} == lines_of
    (product,) = [line for line in lines if line["implementation"] == "textbook" and line["name"] == "aten::bmm"]
    assert float(product["mflops"]) == values(rows, "textbook", "operator_mflops")["aten::bmm"]
    assert product["counted_by"] == "profiler"
    assert product["calls"] == "4"


def test_the_page_has_a_table_of_operators_for_every_step(ran):
    _, rows = ran
    titles = [drawn.title for drawn in tables(rows, ProfileBench.layouts_of(rows))]
    assert {f"Operators: {mixer}, 16 positions, a step (eager)" for mixer in PROFILED} <= set(titles)
    assert "Operators of attention: textbook, 32 positions" in titles


@pytest.mark.usefixtures("without_charts")
def test_the_report_draws_the_parts(ran, tmp_path):
    folder, _ = ran
    page = write_report(folder, target=tmp_path).read_text()
    assert (tmp_path / "figures" / "profile-part_share-part.svg").exists()
    assert "device" not in page[page.index("The answer") : page.index("How it was made")]


def test_an_implementation_that_is_wrong_has_failed_without_a_time(tmp_path, monkeypatch):
    def wrong(*given):
        return 1.001 * profile_attention.textbook(*given)

    monkeypatch.setitem(profile_attention.ATTENTIONS, "sdpa_flash", wrong)
    _, rows = measure(tmp_path, mixers=[], implementations=["sdpa_flash", "textbook"])
    failed = [row.measurement for row in rows if row.identity.variant == "sdpa_flash"]
    assert {(row.status, row.value) for row in failed} == {("failed", None)}
    assert all(row.reason.startswith("output is off by 0.001") for row in failed)
    assert {row.measurement.status for row in rows if row.identity.variant == "textbook"} == {"ok"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_all_attentions_are_one_function(causal, groups):
    shape = profile_attention.GroupedShape(
        batch_size=2, sequence_length=33, num_heads=4, num_key_value_heads=groups, head_width=16, causal=causal
    )
    packed = torch.randn(2, 33, (4 + 2 * groups) * 16)
    angles = profile_attention.rotation(33, 16, 0, profile_attention.THETA, packed.device)
    expected = profile_attention.textbook(shape, packed.double(), angles.double()).float()
    assert expected.shape == (2, 4, 33, 16)
    actual = profile_attention.ATTENTIONS["sdpa_flash"](shape, packed, angles)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_mixer_that_is_not_its_definition_is_not_timed(tmp_path, monkeypatch):
    def wrong(mixer, *given):
        if mixer.name == "linear":
            raise GateError("it is wrong")
        if mixer.name == "softmax":
            raise OutOfResourcesError("out of resource: shared memory")
        return 0.0

    monkeypatch.setattr(profile_step, "mixer_error", wrong)
    _, rows = measure(tmp_path, mixers=["linear", "softmax", "flash"], implementations=[])
    for name, reason in (("linear", "it is wrong"), ("softmax", "OutOfResourcesError: out of resource: shared memory")):
        assert {(row.measurement.status, row.measurement.reason) for row in rows if row.identity.variant == name} == {
            ("failed", reason)
        }
    assert {row.measurement.status for row in rows if row.identity.variant == "flash"} == {"ok"}


def test_a_step_that_does_not_fit_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch):
    labelled = profile_step.labelled_nats

    def full(model, batch):
        if "Softmax" in type(model.layers[0].mixer).__name__:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return labelled(model, batch)

    monkeypatch.setattr(profile_step, "labelled_nats", full)
    _, rows = measure(tmp_path, mixers=["softmax", "linear"], implementations=[])
    assert {row.measurement.status for row in rows if row.identity.variant == "softmax"} == {"out_of_memory"}
    assert {row.measurement.status for row in rows if row.identity.variant == "linear"} == {"ok"}


def test_a_captured_step_has_its_time_and_its_kernels_and_no_parts(monkeypatch):
    """Stand in for a captured step, which needs a GPU, with one that is not captured."""

    def uncaptured(state, settings, precision, *, compiled, captured):
        assert compiled
        assert captured
        return lambda batch, rate: train_step(state, batch, rate, settings, precision)

    monkeypatch.setattr(profile_step, "stepper", uncaptured)
    monkeypatch.setattr(Recording, "kernels", Recording.lines)
    case = profile_step.StepCase(
        mixer="softmax", length=16, batch_size=2, model=MODEL, vocabulary_size=len(VOCABULARY), num_steps=3,
        num_lines=15, repetition=ONCE,
    )  # fmt: skip
    rows = list(profile_step._measure(case, profile_step.CAPTURED, small_model, CPU, {}, 0.0, 1.0))
    assert {row.metric for row in rows} >= {"step_milliseconds", "peak_memory_mib", "operator_milliseconds"}
    assert [row.settings["part"] for row in rows if row.metric == "part_share"] == [IDLE]
    assert "operator_part" not in {name for row in rows for name in row.settings}


def test_models_do_not_train_in_float16(tmp_path):
    _, rows = measure(tmp_path, precision="float16", mixers=["linear"], implementations=[])
    (reason,) = {row.measurement.reason for row in rows if row.identity.variant == "linear"}
    assert reason == "precision=float16: models train in float32, tf32, bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"implementations": ["compiled"]}, ["compiled", "textbook, sdpa_flash, sdpa_cudnn, triton"]),
        ({"num_key_value_heads": 3}, ["bench.num_key_value_heads=3", "bench.num_heads=16"]),
        ({"head_width": 33}, ["bench.head_width=33", "even"]),
        ({"model": [32, 24, 1]}, ["bench.model=[32, 24, 1]", "[width, feed-forward width, layers, heads]"]),
        ({"model": [32, 24, 1, 3]}, ["bench.model=[32, 24, 1, 3]", "heads dividing width"]),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(options, words):
    with pytest.raises(UserError) as caught:
        build(TARGET, OPTIONS | options, ProfileBench, group="bench")
    assert all(word in str(caught.value) for word in words), caught.value
