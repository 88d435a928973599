"""Time, memory and, where trained, loss of a mixer over model sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from attnbench.data.batches import Batches, evaluation_batches
from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.evals.lib.step_cost import Repetition, lacks_text, measure_step, settle
from attnbench.machine.device import start_afresh
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.loss import split_nats
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, read
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Batch, train

COSTS = {"parameters": "", "step_milliseconds": "ms", "peak_memory_mib": "MiB"}
LOSS = {"nats_per_character": "nat"}


class Scaling(SystemEvaluation):
    """What a step costs at several model sizes, each matched as the run is; with train_tokens what so many teach, too.

    With `train_tokens` every size is trained on that many characters and its loss on the validation split taken;
    `scaling_exponent` is b of the power law loss = a N^-b over their parameters N, with its 95 % interval, for three
    sizes or more.

    Args:
        sizes: model settings by name; conf/model's own, which the yaml's defaults list brings.
        names: which of them are measured, in this order.
        batch_size: sequences a step, of the run's seq_len.
        warmup, repeats, max_seconds: as throughput's.
        train_tokens: characters to train each size on; null: none.
        learning_rate: of that training; every other setting of it is the run's own.
        warmup_steps: of the learning rate.

    Raises:
        UserError: a size that is none or is not there, or tokens that make no step.
    """

    own_sizes: ClassVar[bool] = True
    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("step_milliseconds", "model"),
        ("peak_memory_mib", "model"),
        ("nats_per_character", "model"),
    )
    headline: ClassVar[tuple[Headline, ...]] = (Headline("step_milliseconds", "ms a step", axes=("model",)),)
    smoke: ClassVar[dict[str, Any]] = {
        "names": ["tiny", "1m"],
        "batch_size": 2,
        "warmup": 1,
        "repeats": 3,
        "max_seconds": 1.0,
    }
    # Another order: a third size would take seconds.
    one_more: ClassVar[dict[str, Any]] = {"names": ["1m", "tiny"]}

    def __init__(
        self,
        *,
        sizes: dict,
        names: list,
        batch_size: int,
        warmup: int,
        repeats: int,
        max_seconds: float,
        train_tokens: int | None,
        learning_rate: float,
        warmup_steps: int,
    ) -> None:
        check_counts("eval.scaling", batch_size=batch_size, warmup=warmup, repeats=repeats)
        if train_tokens is not None:
            check_counts("eval.scaling", train_tokens=train_tokens)
        if not 0 < learning_rate < math.inf:
            raise UserError(f"eval.scaling.learning_rate={learning_rate}: must be above 0 and finite")
        if warmup_steps < 0:
            raise UserError(f"eval.scaling.warmup_steps={warmup_steps}: must be at least 0")
        known = {name: _settings(name, values) for name, values in sizes.items()}
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise UserError(f"eval.scaling.names={names}: there is no {name}, only {', '.join(known)}")
        self.sizes = {name: known[name] for name in dict.fromkeys(names)}
        self.batch_size, self.train_tokens = batch_size, train_tokens
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.units = COSTS if train_tokens is None else COSTS | LOSS
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Size after size, and at the end the power law."""
        settle(subject)
        losses: dict[int, float] = {}
        for name, model in self.sizes.items():
            settings = {"model": name}
            reason = self._refusal(subject, model)
            if reason is not None:
                yield from without_numbers(self.units, settings, "unsupported", reason)
                continue
            yield from self._costs(subject, model, settings)
            if self.train_tokens is not None:
                trained = attempt(lambda model=model: self._train(subject, model))
                if isinstance(trained, Trained) and not trained.is_diverged:
                    losses[trained.parameters] = trained.nats
                yield _loss_row(trained, settings)
        if self.train_tokens is not None:
            yield power_law(losses)

    def _refusal(self, subject: Subject, model: ModelSettings) -> str | None:
        """Why a size cannot be measured at all, or None."""
        try:
            subject.builder(model)
        except UserError as refusal:
            return str(refusal)
        return lacks_text(subject, subject.seq_len, self.batch_size)

    def _costs(self, subject: Subject, model: ModelSettings, settings: dict[str, Any]) -> Iterator[Measurement]:
        cost = measure_step(
            subject, length=subject.seq_len, batch_size=self.batch_size, repetition=self.repetition, model=model
        )
        if isinstance(cost, OutOfMemory):
            yield from without_numbers(COSTS, settings, "out_of_memory", cost.reason)
            return
        yield Measurement(metric="parameters", value=cost.parameters, unit=COSTS["parameters"], settings=settings)
        yield time_row(cost.times, settings)
        yield cost.memory(settings)

    def _train(self, subject: Subject, size: ModelSettings) -> "Trained":
        """The loss on the validation split after `train_tokens`."""
        start_afresh(subject.device)
        tokens, length = subject.corpus.tokens, subject.seq_len
        num_steps = max(1, (self.train_tokens or 0) // (self.batch_size * length))
        model = subject.new_model(size)
        state = TrainState.fresh(model)
        batches = Batches(tokens["train"], length, self.batch_size, subject.seed, subject.device)
        train(
            state,
            lambda step: Batch(*batches.train_batch(step)),
            replace(subject.train, learning_rate=self.learning_rate, warmup_steps=self.warmup_steps),
            precision=subject.precision,
            num_steps=num_steps,
            hooks=[],
            compiled=subject.compile,
            captured=subject.compile and subject.device.type == "cuda",
        )
        validation = evaluation_batches(tokens["validation"].to(subject.device), length, self.batch_size)
        nats_T, count_T = split_nats(model, validation, subject.precision)
        return Trained(
            parameters=model.num_parameters(),
            nats=float(nats_T.sum() / count_T.sum()),
            num_labels=round(float(count_T.sum())),
            num_skipped=num_steps - int(torch.stack([*state.update_count.values()]).min()),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class Trained:
    """Outcome of a training."""

    parameters: int
    nats: float
    """A character, on the validation split."""
    num_labels: int
    num_skipped: int
    """Updates left out because their gradients were not finite."""

    @property
    def is_diverged(self) -> bool:
        return bool(self.num_skipped) or not math.isfinite(self.nats)


def power_law(losses: dict[int, float]) -> Measurement:
    """The row `scaling_exponent` of losses by number of parameters, see Scaling."""

    def row(value: float | None, **more: Any) -> Measurement:
        return Measurement(metric="scaling_exponent", value=value, unit="", **more)

    if len(losses) < 3:
        reason = f"{len(losses)} sizes have a loss, and a power law with its interval needs 3"
        return row(None, status="unsupported", reason=reason)
    # Imported here: it takes seconds to load, and only this needs it.
    import statsmodels.api as sm

    parameters, nats = zip(*sorted(losses.items()), strict=True)
    fit = sm.OLS(np.log(nats), sm.add_constant(np.log(parameters))).fit()
    low, high = fit.conf_int(alpha=0.05)[1].tolist()
    return row(-float(fit.params[1]), low=-high, high=-low, num_samples=len(losses))


def _loss_row(trained: Trained | OutOfMemory, settings: dict[str, Any]) -> Measurement:
    def row(value: float | None, **more: Any) -> Measurement:
        return Measurement(metric="nats_per_character", value=value, unit="nat", settings=settings, **more)

    if isinstance(trained, OutOfMemory):
        return row(None, status="out_of_memory", reason=trained.reason)
    if trained.is_diverged:
        reason = (
            f"{trained.nats:.4g} nats a character, {trained.num_skipped} updates with gradients that were not finite"
        )
        return row(None, status="diverged", reason=reason)
    return row(trained.nats, num_samples=trained.num_labels)


def _settings(name: str, values: Any) -> ModelSettings:
    """Read a size as conf/model has it."""
    group = f"eval.scaling.sizes.{name}"
    if not isinstance(values, dict):
        raise UserError(f"{group}={values}: must be the settings of a model, as in conf/model")
    return read(ModelSettings, values, group)
