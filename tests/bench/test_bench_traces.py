"""Work inside a step and its parts of the model: real traces of a CPU, and a made-up one of a GPU."""

import gzip
import json
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
from small import PROFILED, TRAIN, VOCABULARY, batch_of, fresh_state
from torch.profiler import profile

from attnbench.bench.profiling.parts import (
    IDLE,
    OTHER,
    PARTS,
    Breakdown,
    Origin,
    break_down,
    by_operator,
    by_region,
    origins_by_region,
    replayed,
)
from attnbench.bench.profiling.recording import Line, record, top
from attnbench.bench.profiling.regions import labelled, labelled_nats, weight_parts
from attnbench.bench.profiling.traces import Work, read_trace, write_trace
from attnbench.settings.errors import UserError
from attnbench.training.step import train_step

CPU = torch.device("cpu")
NUM_STEPS = 2


@pytest.fixture(scope="module", params=PROFILED)
def profiled(request):
    """A labelled step of each mixer under the profiler: its state, its batch, and the recording."""
    state, batch, rate = fresh_state(request.param), batch_of(0), torch.tensor(1e-3)

    def step():
        train_step(state, batch, rate, TRAIN, "float32", labelled_nats)

    with labelled(state.model):
        step()
        return state, batch, record(step, CPU, num_calls=NUM_STEPS, detailed=True)


def test_the_operators_of_a_step_have_all_its_work(profiled):
    _, _, recording = profiled
    assert sum(line.milliseconds for line in recording.lines) == pytest.approx(recording.milliseconds)
    assert recording.lines == sorted(recording.lines, key=lambda line: -line.milliseconds)
    assert len({line.name for line in recording.lines}) == len(recording.lines)


def test_labels_and_shapes_agree_on_every_product_with_a_weight(profiled):
    state, batch, recording = profiled
    weights, num_tokens = weight_parts(state.model), batch.tokens_BT.numel()
    seen = {}
    for work, place in origins_by_region(recording.reading):
        if work.name != "aten::mm":
            continue
        by_shape = by_operator(work, weights, num_tokens)
        if by_shape.part != "mixing":
            assert place == by_shape, work
        seen[place] = seen.get(place, 0) + 1
    # Two layers: three products of a feed-forward, forward once and backward twice; and as the loss the logits.
    assert seen[Origin("feed-forward", "forward")] == 2 * 3 * NUM_STEPS
    assert seen[Origin("feed-forward", "backward")] == 2 * 6 * NUM_STEPS
    assert seen[Origin("loss", "backward")] == 2 * NUM_STEPS
    assert seen[Origin("projections", "backward")] == 2 * seen[Origin("projections", "forward")]


@pytest.mark.parametrize("name", PROFILED)
def test_labels_change_nothing_and_go(name):
    plain, watched = fresh_state(name), fresh_state(name)
    with labelled(watched.model):
        ours = train_step(watched, batch_of(0), torch.tensor(1e-2), TRAIN, "float32", labelled_nats)
    theirs = train_step(plain, batch_of(0), torch.tensor(1e-2), TRAIN, "float32")
    assert torch.equal(ours.loss, theirs.loss)
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())


def test_an_operators_own_time_is_the_profilers():
    left, right = torch.randn(200, 200), torch.randn(200, 200)
    with profile() as profiler:
        for _ in range(3):
            (left @ right).softmax(-1).sum()
    with NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        reading = read_trace(json.loads(Path(file.name).read_text()), "cpu")
    for name in ("aten::mm", "aten::_softmax", "aten::sum", "aten::matmul"):
        (expected,) = [e.self_cpu_time_total for e in profiler.key_averages() if e.key == name]
        read = sum(work.microseconds for work in reading.work if work.name == name)
        assert read == pytest.approx(expected, rel=0.01, abs=0.1)


def event(category, name, start, duration, thread=1, **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 9, "tid": thread,
            "args": arguments}  # fmt: skip


def launch(name, start, correlation, thread=1):
    return event("cuda_runtime", name, start, 1, thread, correlation=correlation)


def kernel(name, start, duration, correlation, category="kernel"):
    return event(category, name, start, duration, 7, correlation=correlation)


GPU_STEP = [
    event("user_annotation", "forward", 0, 100),
    # Both show the number of the node that aten::mm makes, and make none.
    event("user_annotation", "norm", 0, 3),
    event("cpu_op", "aten::to", 1, 1, **{"Sequence number": 3, "Fwd thread id": 0}),
    event("user_annotation", "mixing", 4, 46),
    event("user_annotation", "projections", 5, 20),
    event("cpu_op", "aten::linear", 6, 18, **{"Sequence number": 3, "Fwd thread id": 0}),
    event("cpu_op", "aten::t", 7, 1, **{"Sequence number": 3, "Fwd thread id": 0}),
    event("cpu_op", "aten::mm", 10, 10, **{"Sequence number": 3, "Fwd thread id": 0, "Input Dims": [[64, 8], [8, 24]]}),
    launch("cudaLaunchKernel", 12, 100),
    event("cpu_op", "attnbench::flash_attention", 30, 10, **{"Sequence number": 4, "Fwd thread id": 0}),
    launch("cuLaunchKernelEx", 32, 101),
    event("cpu_op", "aten::add", 60, 10, **{"Sequence number": 5, "Fwd thread id": 0}),
    launch("cudaLaunchKernel", 62, 102),
    # The backward pass runs in another thread, where no label is open.
    event("user_annotation", "backward", 100, 100),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 110, 20, 2, **{"Sequence number": 3}),
    event("cpu_op", "MmBackward0", 111, 18, 2, **{"Sequence number": 3, "Fwd thread id": 1}),
    event("cpu_op", "aten::mm", 112, 10, 2, **{"Input Dims": [[8, 64], [64, 24]]}),
    launch("cudaLaunchKernel", 113, 103, 2),
    event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 140, 20, 2),
    launch("cudaMemcpyAsync", 141, 104, 2),
    event("user_annotation", "optimizer", 200, 50),
    event("cpu_op", "aten::_fused_adamw_", 205, 20),
    launch("cudaLaunchKernel", 210, 105),
    kernel("gemm", 1000, 40, 100),
    kernel("attend", 1040, 30, 101),
    kernel("add", 1070, 10, 102),
    kernel("gemm", 1100, 80, 103),
    kernel("Memcpy DtoD", 1180, 5, 104, "gpu_memcpy"),
    kernel("adamw", 1200, 20, 105),
    kernel("unknown", 1300, 1, 999),
    event("gpu_user_annotation", "forward", 1000, 80, 7),
]  # fmt: skip
GPU_PLACES = [
    ("gemm", Origin("projections", "forward")),
    ("attend", Origin("mixing", "forward")),
    ("add", Origin("other", "forward")),
    ("gemm", Origin("projections", "backward")),
    ("Memcpy DtoD", Origin("other", "backward")),
    ("adamw", Origin("optimizer", "optimizer")),
    ("unknown", OTHER),
]


def test_kernels_are_placed_by_what_launched_them():
    reading = read_trace({"traceEvents": GPU_STEP}, "cuda")
    assert [(work.name, by_region(work, reading.makers)) for work in reading.work] == GPU_PLACES
    assert reading.work[3].operator == "aten::mm"
    found = break_down(origins_by_region(reading), 1, step_milliseconds=0.4)
    assert found.parts["projections"] == pytest.approx(0.12)
    assert found.unplaced == pytest.approx(0.001)
    assert found.shares()[IDLE] == pytest.approx(1 - 0.186 / 0.4)


def test_without_labels_names_and_shapes_place_them():
    reading = read_trace({"traceEvents": GPU_STEP}, "cuda")
    found = [by_operator(work, {(8, 24): "feed-forward"}, 64).part for work in reading.work]
    assert found == ["feed-forward", "mixing", "other", "feed-forward", "other", "optimizer", "other"]


@pytest.mark.parametrize(
    ("name", "operator", "part"),
    [
        ("triton_red_fused__fused_rms_norm_add_3", "triton_red_fused__fused_rms_norm_add_3", "norm"),
        ("triton_red_fused__to_copy_add_mul_pow_sum_4", "triton_red_fused__to_copy_add_mul_pow_sum_4", "norm"),
        ("triton_poi_fused_neg_softplus_1", "triton_poi_fused_neg_softplus_1", "mixing"),
        ("triton_poi_fused__to_copy_2", "triton_poi_fused__to_copy_2", "other"),
        ("_gate_kernel", "attnbench::swiglu", "feed-forward"),
        ("_loss_kernel", "attnbench::linear_cross_entropy_backward", "loss"),
        ("walk_forward_kernel", "attnbench::gated_delta_rule", "mixing"),
        ("cudnn_generated", "aten::_scaled_dot_product_cudnn_attention", "mixing"),
    ],
)
def test_kernels_of_a_compiled_step_are_known_by_name(name, operator, part):
    events = [event("cpu_op", operator, 0, 10), event("cpu_op", "aten::empty", 1, 5), launch("l", 2, 1),
              kernel(name, 20, 5, 1)]  # fmt: skip
    (work,) = read_trace({"traceEvents": events}, "cuda").work
    assert by_operator(work, {}, 64).part == part


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[64, 8], [8, 24]]),
        ("aten::mm", [[64, 24], [24, 8], [64, 8]]),
        ("aten::addmm", [[24], [64, 8], [8, 24], [], []]),
        ("aten::addmm", [[8, 24], [8, 64], [64, 24], [], [], [8, 24]]),
    ],
)
def test_a_product_is_known_by_its_weight_with_and_without_a_result_given(name, dims):
    events = [event("cpu_op", name, 0, 10, **{"Input Dims": dims}), launch("l", 2, 1), kernel("gemm", 20, 5, 1)]
    (work,) = read_trace({"traceEvents": events}, "cuda").work
    assert by_operator(work, {(8, 24): "projections"}, 64).part == "projections"


def test_a_profiler_that_sees_nothing_is_an_error():
    with pytest.raises(UserError, match="saw no kernel"):
        record(lambda: None, CPU, num_calls=1, detailed=False)


def pieces(*names):
    return [Work(name=name, start=float(index), microseconds=1.0, path=[]) for index, name in enumerate(names)]


def test_a_replayed_kernel_has_the_place_of_the_recorded_one():
    mixing, feed, norm = (Origin(part, "forward") for part in ("mixing", "feed-forward", "norm"))
    before = pieces("gemm", "norm", "gemm", "gemm", "norm", "gemm")
    recorded = list(zip(before, [mixing, norm, feed] * 2, strict=True))
    found = replayed(recorded, 2, pieces("copy", "gemm", "norm", "gemm", "copy", "gemm", "norm", "gemm"), 2)
    assert [(work.name, place) for work, place in found] == [
        ("copy", OTHER), ("gemm", mixing), ("norm", norm), ("gemm", feed)
    ] * 2  # fmt: skip


def test_a_kernel_that_a_replay_has_another_number_of_times_has_no_place():
    recorded = [(work, Origin("mixing", "forward")) for work in pieces("gemm", "norm")]
    found = {work.name: place for work, place in replayed(recorded, 1, pieces("gemm", "gemm", "norm"), 1)}
    assert found == {"gemm": OTHER, "norm": Origin("mixing", "forward")}


@pytest.mark.parametrize(("step", "idle"), [(8.0, 0.5), (2.0, 0.0)])
def test_shares_add_up_to_one(step, idle):
    parts = {part: 0.0 for part in PARTS} | {"mixing": 3.0, "norm": 1.0}
    shares = Breakdown(step=step, parts=parts, passes={}, unplaced=0.0).shares()
    assert shares[IDLE] == idle
    assert sum(shares.values()) == pytest.approx(1)


def test_a_weight_of_two_parts_is_neither():
    state = fresh_state()
    assert weight_parts(state.model)[24, 32] == "feed-forward"
    # Gate and up as one product, as on a GPU.
    assert weight_parts(state.model)[32, 48] == "feed-forward"
    assert weight_parts(state.model)[len(VOCABULARY), 32] == "loss"
    state.model.layers[0].feed_forward.down = torch.nn.Linear(32, 32, bias=False)
    assert weight_parts(state.model)[32, 32] == "other"


def test_a_trace_is_kept_as_perfetto_opens_it(tmp_path):
    trace = {"schemaVersion": 1, "host_name": "mine", "traceEvents": [*GPU_STEP, {"ph": "M", "name": "process_name"}]}
    path = tmp_path / "traces" / "step.json.gz"
    write_trace(trace, path)
    kept = json.loads(gzip.decompress(path.read_bytes()))
    assert "host_name" not in kept
    assert len(kept["traceEvents"]) == len(trace["traceEvents"])
    assert [place for _, place in origins_by_region(read_trace(kept, "cuda"))] == [place for _, place in GPU_PLACES]


def test_operators_come_with_calls_memory_and_flops():
    left, right = torch.randn(32, 48), torch.randn(48, 64)
    recording = record(lambda: (left @ right).relu(), CPU, num_calls=5, detailed=True, flops={"aten::clamp_min": 7e6})
    lines = {line.name: line for line in recording.lines}
    assert lines["aten::mm"].calls == 5
    assert lines["aten::mm"].mflops == pytest.approx(5 * 2 * 32 * 48 * 64 / 1e6)
    assert lines["aten::mm"].memory_mib == pytest.approx(5 * 32 * 64 * 4 / 2**20)
    assert not lines["aten::mm"].counted_here
    assert lines["aten::clamp_min"].mflops == pytest.approx(35)
    assert lines["aten::clamp_min"].counted_here


@torch.library.custom_op("attnbench_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    result = x.new_empty(2 * x.numel())
    result[::2], result[1::2] = x.flatten(), x.flatten()
    return result


def test_an_operator_s_memory_is_also_that_which_its_own_operators_allocate():
    x, held = torch.ones(1000, 100), []
    recording = record(lambda: held.append(doubled(x)), CPU, num_calls=3, detailed=True)
    own = next(line for line in recording.lines if line.name == "attnbench_tests::doubled")
    assert own.memory_mib == pytest.approx(3 * 2 * x.nbytes / 2**20)


def test_what_is_not_in_the_table_is_added_up():
    lines = [Line(name=name, calls=2, milliseconds=time) for name, time in (("a", 5.0), ("b", 3.0), ("c", 1.0))]
    shown, rest = top(lines, 1)
    assert [line.name for line in shown] == ["a"]
    assert rest is not None
    assert (rest.calls, rest.milliseconds, rest.name) == (4, 4.0, "2 others")
    assert top(lines, 3) == (lines, None)
