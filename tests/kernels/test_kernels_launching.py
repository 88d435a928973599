"""Kernels begin to compile while an operator is traced: the very ones that it launches later."""

import sys
from contextlib import nullcontext
from functools import partial
from threading import Event, Timer

import pytest
import torch
from kernel_checks import interpreted, normal
from small import mixer_settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.runtime.build import compile_module_from_src
from triton.runtime.errors import OutOfResources

from attnbench.model.building import build_model
from attnbench.ops.attention.triton import flash_launch
from attnbench.ops.attention.triton.flash_op import flash_attention, packed_flash_attention
from attnbench.ops.common.triton import launching
from attnbench.ops.delta.triton.delta_op import gated_delta_rule
from attnbench.ops.diagonal.triton.diagonal_op import diagonal_decay
from attnbench.ops.layers.triton.embedding import embed
from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy
from attnbench.ops.layers.triton.rms_norm import rms_norm
from attnbench.ops.layers.triton.rotary_kernels import split_rotated, turn_packed
from attnbench.ops.layers.triton.short_convolution import short_convolution
from attnbench.ops.layers.triton.swiglu import swiglu
from attnbench.ops.layers.triton.turned_heads import turned_heads
from attnbench.ops.linear.triton.linear_op import linear_attention
from attnbench.ops.scalar.triton.scalar_op import scalar_decay
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings, TrainSettings
from attnbench.training import step as training_step
from attnbench.training.checkpoint import TrainState
from attnbench.training.stack import Member, Stack
from attnbench.training.step import Batch, stepper


class ThirdParty(torch.nn.Module):
    """A part of a library: its class is not one of attnbench's."""


LENGTH, HEADS, WIDTH = 40, 2, 16
MIXED = (2, LENGTH, 3 * HEADS * WIDTH)
"""Query, key and value side by side."""


def delta_rule(mixed: Tensor, *, parallel: bool) -> Tensor:
    rates = mixed[..., :HEADS]
    return gated_delta_rule(
        mixed, -rates.abs(), rates.sigmoid(), num_heads=HEADS, key_width=WIDTH, unit_length=True, parallel=parallel
    )[0]


def decayed(mixed: Tensor) -> Tensor:
    rates, shape = mixed[..., :HEADS], {"num_groups": HEADS, "key_width": WIDTH, "scale": 1.0}
    return scalar_decay(mixed, -rates.abs(), rates.sigmoid(), None, None, **shape)[0]


def decayed_by_channel(mixed: Tensor, *, has_beta: bool = False, has_reader: bool = False) -> Tensor:
    query, key, value = mixed.unflatten(2, (-1, WIDTH)).split(HEADS, dim=2)
    beta = mixed[..., :HEADS].sigmoid() if has_beta else None
    return diagonal_decay(query, key, value, -key.abs(), 0.1 * key if has_reader else None, beta)[0]


def logits_of(x: Tensor) -> Tensor:
    targets = torch.arange(x.shape[0], device=x.device) % 24
    return linear_cross_entropy(x, x[:24], targets, None, torch.is_grad_enabled())[0]


def embedded(weight: Tensor) -> Tensor:
    return embed(torch.arange(10, device=weight.device), weight, torch.float32)


def turned(x: Tensor) -> Tensor:
    return sum(split_rotated(x, angles_of(x), HEADS, HEADS))


def turned_heads_of(x: Tensor) -> Tensor:
    gain, bias = x[:1, :2, :WIDTH], x[:1, : 2 * HEADS, :WIDTH].unflatten(1, (2, HEADS))
    return turned_heads(x, gain, bias, x[..., : HEADS * 4].unflatten(2, (HEADS, 4)).float(), 1e-6)


def attended(x: Tensor) -> Tensor:
    return flash_attention(*x.unflatten(2, (-1, WIDTH)).split(HEADS, dim=2), causal=True)


def packed(x: Tensor) -> Tensor:
    return packed_flash_attention(x, angles_of(x), num_heads=HEADS, num_key_value_heads=HEADS, causal=True)


def angles_of(x: Tensor) -> Tensor:
    return torch.ones(2, LENGTH, WIDTH // 2, device=x.device)


OPERATORS = {
    "swiglu": (swiglu, (33, 48)),
    "rms_norm": (lambda x: rms_norm(x, x[:1], 1e-6), (34, 48)),
    "embed": (embedded, (30, 16)),
    "linear_cross_entropy": (logits_of, (30, 16)),
    "short_convolution": (lambda x: short_convolution(x, x[0, :8, :4], silu=True), (2, 20, 8)),
    "split_rotated": (turned, MIXED),
    "turned_heads": (turned_heads_of, MIXED),
    "turn_packed": (lambda x: turn_packed(x, angles_of(x), 2 * HEADS, False), MIXED),
    "flash_attention": (attended, MIXED),
    "flash_attention, split": (attended, (3, *MIXED[1:])),
    "packed_flash_attention": (packed, MIXED),
    "packed_flash_attention, split": (packed, (3, *MIXED[1:])),
    "linear_attention": (lambda x: linear_attention(x, None, None, HEADS, "elu", 1e-6)[0], MIXED),
    "linear_attention, turned": (
        lambda x: linear_attention(x, None, None, HEADS, "elu", 1e-6, angles_of(x))[0],
        MIXED,
    ),
    "scalar_decay": (decayed, MIXED),
    "scalar_decay, in segments": (decayed, (2, 300, MIXED[2])),
    "gated_delta_rule, walking": (partial(delta_rule, parallel=False), MIXED),
    "gated_delta_rule, parallel": (partial(delta_rule, parallel=True), MIXED),
    "diagonal_decay, nothing erased": (decayed_by_channel, MIXED),
    "diagonal_decay, one strength": (partial(decayed_by_channel, has_beta=True), MIXED),
    "diagonal_decay, a reader": (partial(decayed_by_channel, has_reader=True), MIXED),
}
"""Of a tensor, and the tensor's shape. No two ask an operator the same: the second time nothing would begin."""


@pytest.fixture
def watched(monkeypatch) -> tuple[set, set]:
    """Kernels with what they are compiled for: those that began while an operator was traced, and those launched.

    What is launched does not run: no number decides what else is.
    """
    original, begun, launched = launching.launch, set(), set()

    def watch(kernel, grid, *arguments, **options):
        tensors = [part for part in (*arguments, *options.values()) if isinstance(part, Tensor)]
        named = tuple((key, launching._outline(part)) for key, part in options.items())
        is_traced = any(isinstance(part, FakeTensor) for part in tensors)
        into = begun if is_traced else launched
        into.add((kernel.fn.__qualname__, kernel.fn.__module__, tuple(map(launching._outline, arguments)), named))
        if is_traced:
            original(kernel, grid, *arguments, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "launch", None) is original:
            monkeypatch.setattr(module, "launch", watch)
    monkeypatch.setattr(launching, "can_compile", lambda inputs: True)
    monkeypatch.setattr(launching, "begin", lambda *kernel: None)
    return begun, launched


@interpreted
@pytest.mark.parametrize("name", OPERATORS)
def test_all_that_is_launched_was_begun_while_tracing(name, watched, monkeypatch):
    (function, shape), (begun, launched) = OPERATORS[name], watched
    if name.endswith(", split"):
        monkeypatch.setattr(flash_launch, "splits_for", lambda *_: 2)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled(normal(*shape).requires_grad_()).sum().backward()
    assert launched
    assert name.endswith(", split") == any(kernel == "add_up_kernel" for kernel, *_ in launched)
    assert begun == launched


MIXERS = {"softmax": "torch", "flash": "triton", "linear": "triton", "gated_deltanet": "triton", "kda": "triton"}


@interpreted
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("stack", [1, 2])
def test_kernels_of_a_step_that_is_not_compiled_begin_before_it(name, stack, watched, monkeypatch):
    begun, launched = watched
    for module in list(sys.modules.values()):
        if hasattr(module, "on_kernels"):
            monkeypatch.setattr(module, "on_kernels", lambda x: x.dtype == torch.float32)
    # No two cases have one shape: the second time an operator is asked the same nothing begins.
    number = 2 * list(MIXERS).index(name) + stack
    length, num_symbols = 33 + number, 20 + number
    size = ModelSettings(name="thin", dim=32, num_layers=1, head_width=16, feed_forward_width=24)
    mixer = mixer_settings(name)
    mixer.options["backend"] = MIXERS[name]
    tokens = torch.arange(2 * length).view(2, length) % 20
    batch = Batch(tokens, tokens[:, :3], torch.ones(2, 3), tokens[:, 3:6])
    states = [TrainState.fresh(build_model([mixer], size, vocabulary_size=num_symbols, seed=i)) for i in range(stack)]
    settings, rate = TrainSettings(num_steps=9, batch_size=2, compile=False), torch.tensor(1e-3)
    if stack == 1:
        step = partial(stepper(states[0], settings, "float32"), batch, rate)
    else:
        how = {"batches": lambda step: batch, "settings": settings, "num_steps": 9, "hooks": []}
        members = [Member(state=state, **how) for state in states]
        step = partial(Stack(members, "float32").step, members)
    step()
    assert len(launched) >= 7
    assert begun == launched
    before = len(begun)
    step()
    assert len(begun) == before


@interpreted
def test_what_cannot_be_foreseen_says_so_when_it_runs(monkeypatch):
    monkeypatch.setattr(launching, "can_compile", lambda inputs: True)
    traced = []

    def loss(x: Tensor) -> Tensor:
        traced.append(x.shape)
        return x[: int(x.sum())].sum()

    for rows in (3, 3, 4):
        launching.foresee(loss, [torch.ones(1, requires_grad=True)], [torch.ones(rows)], "of a length that is a sum")
    assert traced == [(3,), (4,)]


@pytest.mark.parametrize("part", [None, torch.nn.Identity(), ThirdParty()])
def test_kernels_of_others_are_not_traced(part, monkeypatch):
    size = ModelSettings(name="thin", dim=32, num_layers=1, head_width=16, feed_forward_width=24)
    model = build_model([mixer_settings("softmax")], size, vocabulary_size=20, seed=0)
    model.layers[0].mixer.part = part
    asked = []
    monkeypatch.setattr(launching, "foresee", lambda *given: asked.append(given))
    monkeypatch.setattr(training_step, "on_kernels", lambda x: True)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    training_step.foresee(model, training_step.batch_nats, Batch(tokens, tokens), "float32")
    assert bool(asked) != isinstance(part, ThirdParty)
    model.layers[0].mixer.backend = "fla"
    training_step.foresee(model, training_step.batch_nats, Batch(tokens, tokens), "float32")
    assert len(asked) <= 1
    model.layers[0].mixer.backend, model.layers[0].mixer.part = "torch", None
    asked.clear()
    monkeypatch.setattr(training_step, "on_kernels", lambda x: False)
    training_step.foresee(model, training_step.batch_nats, Batch(tokens, tokens), "float32")
    assert not asked


class Kernel:
    """Only says what it is asked to compile, to load and to run."""

    def __init__(self, allowed: Event | None = None) -> None:
        self.asked, self.done, self.allowed = [], [], allowed

    def warmup(self, *arguments, grid, **options) -> "Kernel":
        if self.allowed is not None:
            self.allowed.wait(10)
        self.asked.append((arguments, options))
        return self

    @property
    def run(self) -> None:
        self.done.append("loaded")

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.done.append("launched")


def finish() -> None:
    launching._threads().shutdown(wait=True)
    launching._threads.cache_clear()


@interpreted
def test_a_kernel_is_compiled_once_for_the_same_arguments(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    kernel = Kernel()
    with FakeTensorMode():
        for rows in (4, 8, 4):
            tensors = torch.empty(rows, dtype=torch.bfloat16), torch.empty(rows)
            launching.launch(kernel, (rows,), tensors[0], rows, scale=tensors[1], BLOCK=16)
    finish()
    assert sorted(arguments[1] for arguments, _ in kernel.asked) == [4, 8]
    assert {arguments[0] for arguments, _ in kernel.asked} == {torch.bfloat16}
    assert {(options["scale"].dtype, options["BLOCK"]) for _, options in kernel.asked} == {(torch.float32, 16)}
    assert kernel.done == ["loaded", "loaded"]


@interpreted
def test_nothing_is_launched_while_a_kernel_is_half_loaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    allowed = Event()
    kernel = Kernel(allowed)
    with FakeTensorMode():
        launching.launch(kernel, (1,), torch.empty(4))
    Timer(0.2, allowed.set).start()
    launching.launch(kernel, (1,), torch.empty(4))
    assert kernel.done == ["loaded", "launched"]
    finish()
    assert not launching._unfinished


@interpreted
def test_an_operator_is_traced_through_once_for_the_same_inputs(monkeypatch):
    monkeypatch.setattr(launching, "can_compile", lambda inputs: True)
    monkeypatch.setattr(launching, "begin", lambda *kernel: begun.append(kernel))
    begun = []
    with FakeTensorMode():
        for rows in (71, 72, 71):
            swiglu(torch.empty(rows, 8))
    assert len(begun) == 2


@interpreted
def test_a_kernel_that_cannot_be_loaded_counts_as_not_loaded(monkeypatch):
    class Unloadable(Kernel):
        _run = None

        @property
        def run(self) -> None:
            self._run = "half"
            raise RuntimeError("no memory")

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    kernel = Unloadable()
    with FakeTensorMode():
        launching.launch(kernel, (1,), torch.empty(4))
    finish()
    assert kernel.asked
    assert kernel._run is None


def test_a_kernel_that_a_device_has_too_little_memory_for_says_so_in_one_line():
    class Kernel:
        fn = linear_attention

        def __getitem__(self, grid):
            raise OutOfResources(163840, 101376, "shared memory")

    with pytest.raises(UserError, match=r"linear_attention.* needs 163840 of .* 101376 \(shared.* attn.backend"):
        launching.launch(Kernel(), (1,), torch.empty(4))


@interpreted
def test_what_an_operator_cannot_take_it_says_when_it_runs(monkeypatch):
    monkeypatch.setattr(launching, "can_compile", lambda inputs: True)
    with FakeTensorMode():
        outline = flash_attention(*(torch.empty(1, 4, 2, 300) for _ in range(3)), causal=True)
    assert outline.shape == (1, 4, 2, 300)
    with pytest.raises(ValueError, match="300 channels"):
        flash_attention(*(torch.empty(1, 4, 2, 300) for _ in range(3)), causal=True)


def test_nothing_begins_away_from_a_card_or_for_sizes_that_are_not_known(monkeypatch):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.empty(7), static_shapes=False).shape[0]
    with mode:
        known, unknown = torch.empty(7, device="cuda:0"), torch.empty(size, device="cuda:0")
        elsewhere = torch.empty(7, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launching, "interpreted", lambda: False)
    assert launching.can_compile((known, 7, None))
    assert not launching.can_compile((known, elsewhere))
    assert not launching.can_compile((unknown, 7))
    assert not launching.can_compile((known, size))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not launching.can_compile((known,))


@pytest.mark.gpu
def test_what_was_begun_is_what_a_launch_looks_for():
    from attnbench.ops.layers.triton.swiglu import swiglu_kernel

    x, caches = normal(77, 224, dtype=torch.bfloat16), swiglu_kernel.device_caches[torch.cuda.current_device()][0]
    before = set(caches)
    with FakeTensorMode() as mode:
        swiglu(mode.from_tensor(x))
    finish()
    begun = set(caches)
    swiglu(x)
    assert len(begun - before) == 1
    assert set(caches) == begun


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""
"""A launcher as Triton 3.6 builds it, in what matters here: its name, and that it keeps its state in globals."""


def test_a_launcher_loaded_again_stays_its_own_while_another_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launching._threads()

    def loaded(number):
        return compile_module_from_src(src=LAUNCHER.format(number=number), name="__triton_launcher")

    assert [loaded(number).launch() for number in (1, 2)] == [1, 2]
    # Between a module and its launch another thread can load its own.
    first, second = loaded(1), loaded(2)
    assert (first.launch(), second.launch()) == (1, 2)
