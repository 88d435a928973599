"""Work inside a step and its parts of the model: the profiler's events of a CPU, and made-up ones of a GPU."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from small import PROFILED, TRAIN, batch_of, fresh_state
from torch.autograd import DeviceType

from attnbench.bench.profiling.parts import IDLE, PARTS, labelled, labelled_nats, part_rows
from attnbench.bench.profiling.recording import Recording, record
from attnbench.settings.errors import UserError
from attnbench.training.step import train_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PROFILED)
def test_labels_change_nothing_and_go(name):
    plain, watched = fresh_state(name), fresh_state(name)
    with labelled(watched.model):
        ours = train_step(watched, batch_of(0), torch.tensor(1e-2), TRAIN, "float32", labelled_nats)
    theirs = train_step(plain, batch_of(0), torch.tensor(1e-2), TRAIN, "float32")
    assert torch.equal(ours.loss, theirs.loss)
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())


def values(rows) -> dict:
    return {(row.metric, row.settings.get("part") or row.settings.get("pass") or ""): row.value for row in rows}


def event(name, start, parent=None, *, number=-1, forward_thread=0, microseconds=0.0, label=False):
    """An operator or a label that started a kernel of so many microseconds."""
    return SimpleNamespace(
        name=name, cpu_parent=parent, sequence_nr=number, fwd_thread=forward_thread, is_user_annotation=label,
        device_type=DeviceType.CPU, kernels=[SimpleNamespace(duration=microseconds)],
        time_range=SimpleNamespace(start=start),
    )  # fmt: skip


def kernel(microseconds, label=False):
    elapsed = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=label, time_range=elapsed)


def gpu_step():
    forward, backward, optimizer = (event(name, 0, label=True) for name in ("forward", "backward", "optimizer"))
    norm, mixing = (event(name, 0, forward, label=True) for name in ("norm", "mixing"))
    projections = event("projections", 5, mixing, label=True)
    # All three show the number of the node that aten::mm makes.
    linear = event("aten::linear", 6, projections, number=3)
    node = event("autograd::engine::evaluate_function: MmBackward0", 110, number=3, forward_thread=1)
    copied = event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 140, microseconds=5)
    return [
        *(forward, backward, optimizer, norm, mixing, projections, linear, node, copied),
        event("aten::to", 1, norm, number=3),
        event("aten::mm", 10, linear, number=3, microseconds=40),
        event("attnbench::flash_attention", 30, mixing, number=4, microseconds=30),
        event("aten::add", 60, forward, number=5, microseconds=10),
        event("aten::mm", 112, node, forward_thread=1, microseconds=80),
        event("aten::_fused_adamw_", 205, optimizer, microseconds=20),
        *map(kernel, (40, 30, 10, 80, 5, 20, 1)),
        kernel(80, label=True),
    ]


def test_kernels_are_placed_by_what_launched_them():
    recording = Recording(profiler=SimpleNamespace(events=gpu_step), device_type="cuda", detailed=False)
    assert recording.milliseconds == pytest.approx(0.186)
    found = values(part_rows(recording, 1, 0.4, {}))
    parts = {part: found["part_milliseconds", part] for part in PARTS if found["part_milliseconds", part]}
    assert parts == pytest.approx({"projections": 0.12, "mixing": 0.03, "optimizer": 0.02, "other": 0.016})
    assert found["pass_milliseconds", "backward"] == pytest.approx(0.085)
    # A kernel that no operator started.
    assert found["unplaced_share", ""] == pytest.approx(0.001 / 0.186)
    assert found["part_share", IDLE] == pytest.approx(1 - 0.186 / 0.4)


@pytest.mark.parametrize(("step_ms", "idle"), [(0.372, 0.5), (0.1, 0.0)])
def test_shares_add_up_to_one(step_ms, idle):
    recording = Recording(profiler=SimpleNamespace(events=gpu_step), device_type="cuda", detailed=False)
    shares = {part: value for (metric, part), value in values(part_rows(recording, 1, step_ms, {})).items()
              if metric == "part_share"}  # fmt: skip
    assert shares[IDLE] == pytest.approx(idle)
    assert sum(shares.values()) == pytest.approx(1)


def test_a_profiler_that_sees_nothing_is_an_error():
    with pytest.raises(UserError, match="saw no kernel"):
        record(lambda: None, CPU, num_calls=1, detailed=False)


def test_a_trace_is_kept_as_perfetto_opens_it(tmp_path):
    record(lambda: torch.ones(3).sum(), CPU, num_calls=1, detailed=False).write_trace(tmp_path, "step")
    kept = json.loads(gzip.decompress((tmp_path / "traces" / "step.json.gz").read_bytes()))
    assert not {"host_name", "traceName"} & kept.keys()
    assert "aten::sum" in {event["name"] for event in kept["traceEvents"]}


def test_operators_come_with_calls_memory_and_flops():
    left, right = torch.randn(32, 48), torch.randn(48, 64)
    recording = record(lambda: (left @ right).relu(), CPU, num_calls=5, detailed=True)
    lines = {line.name: line for line in recording.lines({"aten::clamp_min": 7e6})}
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
    own = next(line for line in recording.lines() if line.name == "attnbench_tests::doubled")
    assert own.memory_mib == pytest.approx(3 * 2 * x.nbytes / 2**20)
