"""Every bench of conf/bench at its smoke settings, and the gate, the rows and the tables that they share."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import CPU, ONCE, bench_options
from small import BENCHES, bench_class, bench_words, identity_of

from attnbench.bench.base import Missing, attempted, with_speedups
from attnbench.bench.flash_vs_textbook import FlashVsTextbook
from attnbench.bench.operators.attention import HELD, Problem, measure_attention
from attnbench.bench.operators.gate import PARTS, GateError, largest_error, reference
from attnbench.bench.operators.roofline import Ceilings, Work, attention_work
from attnbench.bench.page import is_bench, write_page
from attnbench.bench.tables import Layout, Values, reasons, tables
from attnbench.machine import device
from attnbench.ops.attention import attention_kernels
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, compiled_textbook, textbook
from attnbench.ops.attention.cuda import cuda_attention as cuda_flash_attention
from attnbench.report.page import write_report
from attnbench.results.row_tables import read_csv
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.errors import UserError

CELL = {"batch_size": 1, "num_heads": 2, "sequence_length": 33, "head_width": 16, "causal": True}
PROBLEM = Problem(**CELL, with_gradients=True, repetition=ONCE)


@pytest.fixture
def run(tmp_path, run_benchmark):
    def run(name, *words):
        flags = [word for word in words if word.startswith("-")]
        where = ["device=cpu", f"outputs_dir={tmp_path}", *bench_words(name)]
        run_benchmark(*flags, f"bench={name}", *where, *(word for word in words if word not in flags))
        return sorted((tmp_path / "benchmark" / name).iterdir())

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "profile" else name for name in BENCHES]
)
def test_a_bench_measures_prints_and_publishes(name, tmp_path, run, capsys):
    (folder,) = run(name)
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines() if str(tmp_path) not in line)
    rows = read_csv(folder / "results.csv")
    assert {row.identity.evaluation for row in rows} == {name}
    assert {row.identity.precision for row in rows} == {"float32"}
    assert any(row.measurement.status == "ok" and row.identity.variant != "device" for row in rows)
    assert not [row for row in rows if row.measurement.status == "failed"]
    # Said only where a column has such shares.
    tables, footnote, _ = printed.partition("roof, the share of the roofline")
    assert bool(footnote) == bool(re.search(r"\broof\b", tables))
    write_page([folder], tmp_path / "page", title="A title")
    page = (tmp_path / "page" / "README.md").read_text()
    assert page.startswith("# A title\n")
    assert f"bench={name}" in page
    assert read_csv(tmp_path / "page" / "results.csv") == rows


@pytest.mark.parametrize("name", BENCHES)
def test_the_tables_of_a_bench_have_errors_and_ratios_that_it_measures(name):
    cls = bench_class(name)
    shown = [values for layout in cls.layouts_of([]) for values in layout.values]
    assert any(values.metric == "max_error" for values in shown)
    ratios = [values.where for values in shown if values.metric == "speedup" and "numerator" in values.where]
    assert {(where["numerator"], where["denominator"]) for where in ratios} <= set(cls.ratios)


def test_cells_with_results_are_not_measured_again_and_missing_ones_are(run):
    (folder,) = run("attention")
    first, *others = paths = sorted(folder.glob("results/*.jsonl"))
    before = {path: path.stat().st_mtime_ns for path in paths}
    first.unlink()
    run("attention")
    assert [path.stat().st_mtime_ns for path in others] == [before[path] for path in others]
    assert first.stat().st_mtime_ns != before[first]
    run("attention", "rerun=true")
    assert all(path.stat().st_mtime_ns != before[path] for path in paths)


@pytest.mark.usefixtures("without_charts")
def test_a_run_that_was_cut_off_is_published_and_reported_with_the_cells_that_are_missing(tmp_path, run):
    (folder,) = run("attention", "bench.lengths=[16,32,33]")
    (folder / "results.csv").unlink()
    for path in sorted(folder.glob("results/attention-0*.jsonl"))[1:]:
        path.unlink()
    write_page([folder], tmp_path / "page", title="t")
    page = (tmp_path / "page" / "README.md").read_text()
    missing = page[page.index("Not measured yet, 2 cells:") :].splitlines()[2:4]
    assert [line.partition(" batch")[0].partition(": ")[2] for line in missing] == [
        f"head_width=16 sequence_length={length}" for length in (32, 33)
    ]
    lengths = {row.measurement.settings.get("sequence_length") for row in read_csv(tmp_path / "page" / "results.csv")}
    assert lengths == {None, 16}
    assert write_report(folder).exists()


@pytest.mark.usefixtures("without_charts")
def test_precisions_are_jobs_of_a_sweep_share_a_table_and_are_apart_in_a_report(tmp_path, run, capsys):
    folders = run("attention", "-m", "precision=float32,bfloat16")
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.strip().startswith("bfloat16"))
    assert line.split()[:3] == ["bfloat16", "16", "32"]
    assert [folder.name.partition("-")[0] for folder in folders] == ["bfloat16", "float32"]
    assert all(map(is_bench, folders))
    page = write_report(tmp_path / "benchmark" / "attention").read_text()
    assert "precision bfloat16" in page
    assert "Attention alone, by each implementation, at every head width and length" in page
    names = {path.stem for path in (tmp_path / "benchmark" / "attention" / "report" / "figures").glob("*.svg")}
    assert {name.partition("precision_")[2].partition("-")[0] for name in names} == {"bfloat16", "float32"}


def _measured(function, monkeypatch, problem=PROBLEM) -> tuple[list[Measurement], list[Measurement]]:
    """The rows of a function in an implementation's stead, and those of the textbook after it."""
    replaced = replace(IMPLEMENTATIONS["textbook"], name="replaced", make=lambda: function)
    monkeypatch.setitem(attention_kernels.IMPLEMENTATIONS, "replaced", replaced)
    rows = list(measure_attention(problem, ["replaced", "textbook"], CELL, CPU))
    of = {name: [row for row in rows if row.settings["implementation"] == name] for name in ("replaced", "textbook")}
    return of["replaced"], of["textbook"]


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (lambda q, k, v, causal: textbook(q, k, v, False), "output"),
        (lambda q, k, v, causal: textbook(q, k, 1.01 * v, causal), "output"),
        (lambda q, k, v, causal: textbook(q * float("nan"), k, v, causal), "output"),
        # The gradient alone is wrong: the forward pass sees no difference.
        (lambda q, k, v, causal: textbook(q + 0.01 * (q - q.detach()), k, v, causal), "query's gradient"),
        (lambda q, k, v, causal: textbook(q, k + 0.01 * (k - k.detach()), v, causal), "key's gradient"),
        (lambda q, k, v, causal: textbook(q, k, v + 0.01 * (v - v.detach()), causal), "value's gradient"),
    ],
)
def test_a_wrong_implementation_is_a_failed_cell_and_not_a_fast_one(wrong, part, monkeypatch):
    failed, right = _measured(wrong, monkeypatch)
    assert {row.status for row in failed} == {"failed"}
    assert all(row.reason.startswith(f"{part} is off by") for row in failed)
    assert {row.status for row in right if row.metric == "forward_milliseconds"} == {"ok"}


def test_one_wrong_position_is_found_in_bfloat16_too():
    tensors = torch.randn(4, 2, 200, 16, generator=torch.Generator().manual_seed(0)).unbind()
    expected = reference(*tensors, causal=True)
    for index, part in enumerate(PARTS):
        actual = [x.clone() for x in expected]
        assert largest_error(actual, expected, "bfloat16") == 0
        actual[index][1, 199] *= 1.5
        actual[index][1, 199] += 0.2 * expected[index][1].norm(dim=-1).mean()
        with pytest.raises(GateError, match=f"{part} is off"):
            largest_error(actual, expected, "bfloat16")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"), "out_of_memory", "CUDA out of memory"),
        (RuntimeError("no such kernel\nand a long story"), "failed", "RuntimeError: no such kernel"),
    ],
)
def test_an_error_is_a_row_and_the_next_has_its_turn(error, status, reason, monkeypatch):
    def raises(q, k, v, causal):
        raise error

    failed, right = _measured(raises, monkeypatch)
    assert {(row.status, row.value) for row in failed} == {(status, None)}
    assert all(row.reason.startswith(reason) for row in failed)
    times = {f"{name}_milliseconds" for name in ("forward", "backward", "total")}
    assert {row.metric for row in failed} == {*times, "max_error", HELD}
    assert any(row.value is not None for row in right)


def test_a_shape_without_a_kernel_is_unsupported_and_a_device_that_is_lost_ends_the_run():
    def raises(text):
        def measure():
            raise RuntimeError(text)

        return measure

    result = attempted(raises("No available kernel. Aborting execution."))
    assert isinstance(result, Missing)
    assert result.status == "unsupported"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attempted(raises("CUDA error: an illegal memory access was encountered"))


def test_the_compiled_one_is_compiled_at_every_shape(monkeypatch):
    """Its limit is a handful of versions of a function, past which it would run as it was written."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    uncached, compile_ = compiled_textbook.__wrapped__, torch.compile

    def with_other_backend(function, *, options, **more):
        return compile_(function, backend=backend, **more)

    monkeypatch.setattr(torch, "compile", with_other_backend)
    # Another backend does not load the module that tells it.
    monkeypatch.setattr(device, "COMPILER", "torch._dynamo")
    compiled, lengths = uncached(), range(16, 28)
    for length in lengths:
        problem = replace(PROBLEM, sequence_length=length, with_gradients=False)
        rows, _ = _measured(compiled, monkeypatch, problem)
        assert {row.status for row in rows} == {"ok"}
    assert len(graphs) == len(lengths)


@pytest.mark.parametrize(
    ("name", "precision", "words"),
    [
        ("flash_attn", "float32", "CUDA alone"),
        ("sdpa_cudnn", "float32", "CUDA alone"),
        ("triton", "bfloat16", "triton"),
        ("cuda_stages", "float16", "forward pass alone"),
    ],
)
def test_an_implementation_that_cannot_run_here_is_unsupported_by_its_name(name, precision, words):
    rows = list(measure_attention(PROBLEM, [name], CELL, replace(CPU, precision=precision)))
    assert {row.status for row in rows} == {"unsupported"}
    assert all(words in row.reason for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a compiler for it")
def test_without_a_compiler_the_cuda_kernel_names_what_is_missing():
    with pytest.raises(UserError, match="nvcc"):
        IMPLEMENTATIONS["cuda_stages"].make()


def test_a_kernel_that_does_not_build_is_built_once(monkeypatch):
    builds = []

    def fails():
        builds.append(1)
        raise UserError("it could not be built: error 1")

    monkeypatch.setattr(cuda_flash_attention, "_build", fails)
    cuda_flash_attention._library.cache_clear()
    for name in ("cuda_mma", "cuda_stages", "cuda_mma"):
        with pytest.raises(UserError, match="could not be built"):
            IMPLEMENTATIONS[name].make()
    cuda_flash_attention._library.cache_clear()
    assert len(builds) == 1


def test_work_is_counted_by_hand():
    work = attention_work(SimpleNamespace(batch_size=2, num_heads=3, sequence_length=4, head_width=8, causal=True), 2)
    # Ten pairs a head; a product costs two operations a pair and channel.
    assert work["forward"] == Work(2 * 2 * 6 * 10 * 8, 4 * 6 * 4 * 8 * 2)
    assert work["backward"].flops == 2.5 * work["forward"].flops
    assert work["total"].num_bytes == 12 * 6 * 4 * 8 * 2
    assert Work(2e9, 1.0).floor_ms(Ceilings(1.0, 10.0)) == pytest.approx(2.0)
    assert Work(1.0, 1e7).floor_ms(Ceilings(1.0, 10.0)) == pytest.approx(1.0)


LAYOUTS = [Layout(title="t", lines=("sequence_length",), values=(Values(metric="forward_milliseconds"),))]


def _row(implementation: str, length: int, value: float | None, **changes) -> ResultRow:
    status: dict[str, Any] = {} if value is not None else {"status": "out_of_memory", "reason": "no room"}
    settings = {"sequence_length": length, **changes}
    return ResultRow(
        identity=identity_of(run="r", variant=implementation, evaluation="attention"),
        measurement=Measurement(metric="forward_milliseconds", value=value, unit="ms", settings=settings, **status),
    )


def test_a_table_shows_that_numbers_are_missing_and_says_why():
    rows = [_row("textbook", 1024, 2.0), _row("triton", 1024, 1.0), _row("textbook", 2048, None)]
    (table,) = tables(rows, LAYOUTS)
    assert table.headers == ["sequence length", "textbook", "triton"]
    assert table.lines == [["1,024", "2", "1"], ["2,048", "no memory", "–"]]
    assert reasons(rows, LAYOUTS) == ["textbook in 1 cell: out of memory, no room"]


def test_settings_that_tell_the_rows_of_a_table_apart_are_labels_of_its_lines():
    rows = [_row("textbook", 1024, value, causal=value > 1, batch_size=8) for value in (2.0, 1.0)]
    (table,) = tables(rows, LAYOUTS)
    assert table.headers == ["causal", "sequence length", "textbook"]
    assert table.lines == [["yes", "1,024", "2"], ["no", "1,024", "1"]]
    assert table.num_labels == 2


def test_a_sweep_that_measures_a_cell_twice_keeps_its_rows(tmp_path, run, capsys):
    with pytest.raises(SystemExit):
        run("attention", "-m", "bench.max_seconds=0.1,0.2")
    assert re.search(r"textbook at head_width=16, .* was measured twice, in .* and in ", capsys.readouterr().err)
    assert len(list((tmp_path / "benchmark" / "attention").glob("*/results.csv"))) == 2


def test_a_ratio_is_of_two_implementations_pass_by_pass():
    def time(name, metric, value):
        return Measurement(metric=metric, value=value, unit="ms", settings={"implementation": name, "head_width": 64})

    rows = [time("sdpa_flash", "forward_milliseconds", 3.0), time("sdpa_flash", "backward_milliseconds", 5.0)]
    rows += [time("triton", "forward_milliseconds", 2.0), time("textbook", "forward_milliseconds", 9.0)]
    *first, speedup = with_speedups(rows, [("sdpa_flash", "triton"), ("flash_attn", "triton")])
    assert first == rows
    assert (speedup.metric, speedup.value) == ("speedup", 1.5)
    assert speedup.settings == {
        "implementation": "triton", "head_width": 64,
        "pass": "forward", "numerator": "sdpa_flash", "denominator": "triton",
    }  # fmt: skip


def test_a_page_is_of_runs_of_one_bench(tmp_path, run):
    folders = [*run("attention"), *run("grid")]
    with pytest.raises(UserError, match="one bench"):
        write_page(folders, tmp_path / "page", title="t")
    (tmp_path / "config.yaml").write_text("model: {}\n")
    with pytest.raises(UserError, match=r"is no run of attnbench bench"):
        write_page([tmp_path], tmp_path / "page", title="t")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench=models", "bench.mixers=[softmax,nosuch]"], "error: attn=nosuch: unknown; there is "),
        (["bench=decode", "bench.mixers=[[nosuch,auto]]"], "error: attn=nosuch: unknown; there is "),
        (["bench=profile", "bench.mixers=[nosuch]"], "error: attn=nosuch: unknown; there is "),
        (["bench=attention", "bench.lengths=[]"], "error: bench.lengths=[]: leaves bench=attention nothing"),
        (["bench=grid", "bench.batch_sizes=[]"], "error: bench.batch_sizes=[]: leaves bench=grid nothing"),
        (
            ["bench=decode", "bench.implementations=[]", "bench.texts=[]", "bench.contexts=[]"],
            "error: bench.implementations=[], bench.texts=[], bench.contexts=[]: leaves bench=decode nothing",
        ),
        (
            ["bench=profile", "bench.implementations=[]", "bench.mixers=[]"],
            "error: bench.implementations=[], bench.mixers=[]: leaves bench=profile nothing",
        ),
    ],
)
def test_an_impossible_run_is_refused_before_anything_is_measured(words, message, tmp_path, run_benchmark, capsys):
    with pytest.raises(SystemExit):
        run_benchmark(*words, "device=cpu", f"outputs_dir={tmp_path}")
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("benchmark/*"))


def test_speed_ups_need_the_textbook():
    with pytest.raises(UserError, match="must have textbook"):
        FlashVsTextbook(**bench_options("flash_vs_textbook", implementations=["triton"]))


@pytest.mark.parametrize(
    ("name", "precision", "width", "words"),
    [
        ("sdpa_efficient", "float32", 64, None),
        ("sdpa_efficient", "tf32", 64, "tf32"),
        ("cuda_stages", "float16", 64, None),
        ("cuda_stages", "float16", 32, "64 or 128"),
        ("cuda_stages", "float32", 64, "float32"),
    ],
)
def test_a_refusal_names_what_an_implementation_does_not_do(name, precision, width, words):
    refusal = IMPLEMENTATIONS[name].refusal("cuda", precision, width)
    assert refusal is None if words is None else words in (refusal or "")
