"""Training steps that workers build, ours and peers', at the same shape, data, seed and schedule."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from attnbench.data.batches import Batches
from attnbench.data.corpus import Corpus, load_corpus
from attnbench.machine import device as support
from attnbench.machine.device import keep_freed_memory, resolve_device
from attnbench.machine.precision import resolve_compile, resolve_precision
from attnbench.model.building import build_meta, build_model, resolve_mixer
from attnbench.model.matching import TOLERANCE, match_model, solve_width
from attnbench.ops.delta.delta_rule import chunk_size, chunked_gated_delta_rule
from attnbench.results.folder import data_root
from attnbench.settings.schema import MixerSettings, ModelSettings, RunSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.learning_rate import learning_rates
from attnbench.training.step import Batch, stepper
from benchmarks.peers.models import FlaModel, NanoGPT, Operator, PlainGPT, naive_delta_rule

NUM_SCHEDULED = 10_000
"""Steps of the schedule of rates, of which a measurement sees the beginning."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Order:
    """One step to build; plain data, so that it can be sent as JSON."""

    kind: str
    """ours, plain_gpt, nanogpt, fla, chunked_delta_rule or naive_delta_rule."""
    overrides: list[str]
    """Settings as train.py's command line has them: shape, data, schedule, device."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the implementation; of ours `plain`, see `use_plain_layers`."""
    parameters: int | None = None
    """Number that ours is to have; None: as many as softmax in a model of these settings."""


class Built(NamedTuple):
    """An implementation that is ready to train."""

    step: Callable[[int], Tensor]
    """Train on the batch of that number; returns the loss, which the next call may overwrite."""
    parameters: int
    mixer: str
    backend: str
    feed_forward_width: int | None
    """None where the implementation chooses it."""
    precision: str
    corpus: Corpus | None


class Shared(NamedTuple):
    """Everything that ours and a peer have alike."""

    settings: RunSettings
    corpus: Corpus
    batches: Batches
    rates: Tensor
    """Learning rates of NUM_SCHEDULED steps."""
    device: torch.device
    precision: str


def build(order: Order, settings: RunSettings) -> Built:
    """Build what was ordered.

    Args:
        settings: the order's overrides, composed.

    Raises:
        AbsentPeerError: a peer that is not here.
        UserError: a setting that cannot be.
    """
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.train.precision, device.type)
    if device.type == "cpu":
        keep_freed_memory()
    if order.kind in ("chunked_delta_rule", "naive_delta_rule"):
        return _operator(order, device)
    corpus = load_corpus(settings.data, settings.seq_len, data_root())
    batches = Batches(corpus.tokens["train"], settings.seq_len, settings.train.batch_size, settings.seed, device)
    torch.manual_seed(settings.seed)
    rates = learning_rates(settings.train, NUM_SCHEDULED)
    shared = Shared(settings, corpus, batches, rates, device, precision)
    return (_ours if order.kind == "ours" else _peer)(order, shared)


def use_plain_layers() -> None:
    """From here on, and in this process alone, the layers that all mixers share run in torch, without our kernels.

    Training has no such setting: only a reference to compare it with is made so, in a worker of its own.
    """
    original = support.on_kernels
    for module in list(sys.modules.values()):
        if getattr(module, "on_kernels", None) is original:
            vars(module)["on_kernels"] = _never


def _never(x: Tensor) -> bool:
    return False


def _ours(order: Order, shared: Shared) -> Built:
    """The very step that trains, as scripts/train.py takes it on this device."""
    settings, corpus, batches, rates, device, precision = shared
    if order.options.get("plain"):
        use_plain_layers()
    mixer = resolve_mixer(settings.mixer, settings.model, device_type=device.type, precision=precision)
    mixers = [mixer] * settings.model.num_layers
    size = _sized(order, settings, mixers, corpus.vocabulary_size)
    model = build_model(mixers, size, vocabulary_size=corpus.vocabulary_size, seed=settings.seed, device=device)
    state, rates = TrainState.fresh(model), rates.to(device)
    is_compiled = resolve_compile(settings.train.compile, device.type)
    is_captured = is_compiled and device.type == "cuda"
    train_step = stepper(state, settings.train, precision, compiled=is_compiled, captured=is_captured)
    model.train()

    def step(number: int) -> Tensor:
        report = train_step(Batch(*batches.train_batch(number)), rates[min(number, NUM_SCHEDULED - 1)])
        state.step += 1
        return report.loss

    return Built(
        step=step,
        parameters=model.num_parameters(),
        mixer=mixer.target.rpartition(".")[2],
        backend=mixer.options["backend"],
        feed_forward_width=size.feed_forward_width,
        precision=precision,
        corpus=corpus,
    )


def _sized(order: Order, settings: RunSettings, mixers: list[MixerSettings], vocabulary_size: int) -> ModelSettings:
    """The model with the feed-forward width that meets the parameters asked for."""
    model = settings.model
    if order.parameters is None:
        matched = match_model(mixers, model, match="params", seq_len=settings.seq_len, vocabulary_size=vocabulary_size)
        return matched.model

    def parameters(width: int) -> int:
        sized = replace(model, feed_forward_width=width)
        return build_meta(mixers, sized, vocabulary_size=vocabulary_size).num_parameters()

    width = solve_width(parameters, order.parameters, "params", reference="the peer")
    # As people choose widths, in the steps of a GPU's matrix products, where that is as near as matching asks.
    even = round(width / 64) * 64
    if even and abs(parameters(even) / order.parameters - 1) <= TOLERANCE:
        width = even
    return replace(model, feed_forward_width=width)


def _peer(order: Order, shared: Shared) -> Built:
    """A peer's model with the optimizer of its training scripts."""
    settings, corpus, batches, rates, device, precision = shared
    model = _peer_model(order, settings, corpus.vocabulary_size).to(device).train()
    train, schedule = settings.train, rates.tolist()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(train.beta1, train.beta2),
        fused=True,
    )
    if precision != "float32":
        # As their training scripts set it; in bfloat16 little is left for it to change.
        torch.set_float32_matmul_precision("high")

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = schedule[min(number, NUM_SCHEDULED - 1)]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model.loss(*batches.train_batch(number))  # pyright: ignore[reportCallIssue]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Built(
        step=step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixer=order.options.get("model", order.kind),
        backend=order.kind,
        feed_forward_width=None,
        precision=precision,
        corpus=corpus,
    )


def _peer_model(order: Order, settings: RunSettings, vocabulary_size: int) -> nn.Module:
    shape = (settings.model, vocabulary_size, settings.seq_len)
    if order.kind == "fla":
        options = {name: value for name, value in order.options.items() if name != "model"}
        return FlaModel(*shape, name=order.options["model"], options=options)
    return {"plain_gpt": PlainGPT, "nanogpt": NanoGPT}[order.kind](*shape, **order.options)


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Our chunked form with the chunk size that the mixer uses."""
    scaled = query * query.shape[-1] ** -0.5
    return chunked_gated_delta_rule(scaled, key, value, log_decay, beta, None, chunk_size(query.device.type))[0]


def example_inputs(shape_BTHK: tuple[int, int, int, int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Query and key of length 1, value normal, decays of 0.8 to 1, beta in 0..1; all asking for gradients; V = K."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape_BTHK, generator=generator) for _ in range(3))
    log_decay, beta = (torch.rand(shape_BTHK[:3], generator=generator) for _ in range(2))
    inputs = [normalize(query, dim=-1), normalize(key, dim=-1), value, -0.2 * log_decay, beta]
    return [x.to(device).requires_grad_() for x in inputs]


def _operator(order: Order, device: torch.device) -> Built:
    """Forward and backward of an operator, with a full gradient of its output, as in a model."""
    operator: Operator = chunked_delta_rule if order.kind == "chunked_delta_rule" else naive_delta_rule()
    inputs = example_inputs(tuple(order.options["shape"]), device)

    def step(number: int) -> Tensor:
        output = operator(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        return output.detach().sum()

    return Built(
        step=step,
        parameters=0,
        mixer="GatedDeltaNet",
        backend=order.kind,
        feed_forward_width=None,
        precision="float32",
        corpus=None,
    )
