"""What a worker builds: a training step, ours or a peer's, at the same shape, data, seed and schedule."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnbench.data.batches import Batches
from attnbench.data.vocabulary import Corpus, load_corpus
from attnbench.machine import device as support
from attnbench.machine.device import keep_freed_memory, resolve_device
from attnbench.machine.precision import resolve_compile, resolve_precision
from attnbench.model.language_model import build_meta, build_model, resolve_mixer
from attnbench.model.matching import TOLERANCE, match_model, solve_width
from attnbench.results.folder import data_root
from attnbench.settings.schema import DataSettings, MixerSettings, ModelSettings, RunSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Batch, Step, learning_rates, stepper
from benchmarks.peers.delta_rule import chunked_delta_rule, forward_and_backward, naive_delta_rule
from benchmarks.peers.models import FlaModel, NanoGPT, PlainGPT

NUM_SCHEDULED = 10_000
"""Steps of the schedule of rates, of which a measurement sees the beginning."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Job:
    """What to build; plain data, so that it can be sent as JSON."""

    kind: str
    """ours, plain_gpt, nanogpt, fla, chunked_delta_rule or naive_delta_rule."""
    options: dict[str, Any]
    """Of the implementation; of ours `plain`, see `use_plain_layers`."""
    mixer: MixerSettings
    """Of ours, and of a peer that with which it is compared."""
    model: ModelSettings
    data: DataSettings
    train: TrainSettings
    seq_len: int
    seed: int
    device: str
    parameters: int | None = None
    """That ours is to have; None: as many as softmax in a model of these settings."""

    @classmethod
    def of(cls, settings: RunSettings, kind: str, options: dict[str, Any], parameters: int | None = None) -> "Job":
        """The shape, data and schedule of a training."""
        shared = ("mixer", "model", "data", "train", "seq_len", "seed", "device")
        return cls(
            kind=kind, options=options, parameters=parameters, **{name: getattr(settings, name) for name in shared}
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Job":
        groups = {"mixer": MixerSettings, "model": ModelSettings, "data": DataSettings, "train": TrainSettings}
        return cls(**{**content, **{name: group(**content[name]) for name, group in groups.items()}})


class Built(NamedTuple):
    """An implementation that is ready to train."""

    step: Callable[[int], Tensor]
    """Trains on the batch of that number; the loss, which the next call may overwrite."""
    parameters: int
    mixer: str
    backend: str
    feed_forward_width: int | None
    """None where the implementation chooses its own."""
    precision: str
    corpus: Corpus | None


def build(job: Job) -> Built:
    """Builds what the job names.

    Raises:
        AbsentPeerError: a peer that is not here.
        UserError: what cannot be built, with the setting.
    """
    device = resolve_device(job.device)
    precision = resolve_precision(job.train.precision, device.type)
    if device.type == "cpu":
        keep_freed_memory()
    if job.kind in ("chunked_delta_rule", "naive_delta_rule"):
        return _operator(job, device)
    corpus = load_corpus(job.data, job.seq_len, data_root())
    batches = Batches(corpus.tokens["train"], job.seq_len, job.train.batch_size, job.seed, device)
    torch.manual_seed(job.seed)
    if job.kind == "ours":
        return _ours(job, corpus, batches, device, precision)
    return _peer(job, corpus, batches, device, precision)


def training_step(state: TrainState, settings: TrainSettings, precision: str, device: torch.device) -> Step:
    """The very step that trains, as scripts/train.py takes it on this device."""
    is_compiled = resolve_compile(settings.compile, device.type)
    is_captured = is_compiled and device.type == "cuda"
    return stepper(state, settings, precision, compiled=is_compiled, captured=is_captured)


def use_plain_layers() -> None:
    """From now on, and in this process alone, the layers that all mixers share run in torch, without our kernels.

    Training has no such setting: only a reference to compare it with is made so, in a worker of its own.
    """
    original = support.on_kernels
    for module in list(sys.modules.values()):
        if getattr(module, "on_kernels", None) is original:
            vars(module)["on_kernels"] = _never


def _never(x: Tensor) -> bool:
    return False


def _ours(job: Job, corpus: Corpus, batches: Batches, device: torch.device, precision: str) -> Built:
    if job.options.get("plain"):
        use_plain_layers()
    resolved = resolve_mixer(job.mixer, job.model, device_type=device.type, precision=precision)
    mixers = [resolved] * job.model.num_layers
    settings = _sized(job, mixers, corpus.vocabulary_size)
    model = build_model(mixers, settings, vocabulary_size=corpus.vocabulary_size, seed=job.seed, device=device)
    state = TrainState.fresh(model)
    train_step = training_step(state, job.train, precision, device)
    rates = learning_rates(job.train, NUM_SCHEDULED).to(device)
    model.train()

    def step(number: int) -> Tensor:
        report = train_step(Batch(*batches.train_batch(number)), rates[min(number, NUM_SCHEDULED - 1)])
        state.step += 1
        return report.loss

    return Built(
        step=step,
        parameters=model.num_parameters(),
        mixer=resolved.target.rpartition(".")[2],
        backend=resolved.options["backend"],
        feed_forward_width=settings.feed_forward_width,
        precision=precision,
        corpus=corpus,
    )


def _sized(job: Job, mixers: list[MixerSettings], vocabulary_size: int) -> ModelSettings:
    """The model with the feed-forward width that meets the parameters asked for."""
    if job.parameters is None:
        matched = match_model(mixers, job.model, match="params", seq_len=job.seq_len, vocabulary_size=vocabulary_size)
        return matched.model

    def parameters(width: int) -> int:
        sized = replace(job.model, feed_forward_width=width)
        return build_meta(mixers, sized, vocabulary_size=vocabulary_size).num_parameters()

    width = solve_width(parameters, job.parameters, "params", reference="the peer")
    # As people choose widths, in the steps of a GPU's matrix products, where that is as near as matching asks.
    even = round(width / 64) * 64
    if even and abs(parameters(even) / job.parameters - 1) <= TOLERANCE:
        width = even
    return replace(job.model, feed_forward_width=width)


def _peer(job: Job, corpus: Corpus, batches: Batches, device: torch.device, precision: str) -> Built:
    model = _peer_model(job, corpus.vocabulary_size).to(device).train()
    settings, rates = job.train, learning_rates(job.train, NUM_SCHEDULED).tolist()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )
    if precision != "float32":
        # As their training scripts set it; in bfloat16 little is left for it to change.
        torch.set_float32_matmul_precision("high")

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rates[min(number, NUM_SCHEDULED - 1)]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model.loss(*batches.train_batch(number))  # pyright: ignore[reportCallIssue]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Built(
        step=step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixer=job.options.get("model", job.kind),
        backend=job.kind,
        feed_forward_width=None,
        precision=precision,
        corpus=corpus,
    )


def _peer_model(job: Job, vocabulary_size: int) -> nn.Module:
    shape = (job.model, vocabulary_size, job.seq_len)
    if job.kind == "fla":
        options = {name: value for name, value in job.options.items() if name != "model"}
        return FlaModel(*shape, name=job.options["model"], options=options)
    return {"plain_gpt": PlainGPT, "nanogpt": NanoGPT}[job.kind](*shape, **job.options)


def _operator(job: Job, device: torch.device) -> Built:
    operator = chunked_delta_rule if job.kind == "chunked_delta_rule" else naive_delta_rule()
    return Built(
        step=forward_and_backward(operator, tuple(job.options["shape"]), device),
        parameters=0,
        mixer="GatedDeltaNet",
        backend=job.kind,
        feed_forward_width=None,
        precision="float32",
        corpus=None,
    )
