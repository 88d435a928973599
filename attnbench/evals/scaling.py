"""Time, memory and, where trained, loss of a mixer over model sizes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, ClassVar

import numpy as np

from attnbench.data.batches import Batches, evaluation_batches
from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.options import check_training
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.evals.lib.step_cost import Repetition, lacks_text, measure_step, settle
from attnbench.evals.perplexity import NO_TEST_SPLIT
from attnbench.machine.device import start_afresh
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.loss import split_nats
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value, read
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import text_batch, train

COSTS = {"parameters": "", "step_milliseconds": "ms", "peak_memory_mib": "MiB"}
LOSS = {"non_embedding_parameters": "", "nats_per_character": "nat"}
FIT = {"scaling_exponent": "", "irreducible_nats_per_character": "nat"}

MIN_SIZES = 5
"""Sizes that a power law with an irreducible loss, three numbers, is fitted to at least."""

NUM_RESAMPLES = 499


class Scaling(SystemEvaluation):
    """Cost of a step at several model sizes, each matched as the run is; with train_tokens the loss after so many, too.

    With `train_tokens` every size has its learning rate searched on the validation split, and is then trained on that
    many characters with several seeds; its loss is that of the test split. Of five sizes or more the power law
    loss = irreducible + a N^-b over their non-embedding parameters N is fitted to the means over seeds;
    `scaling_exponent` is b, and the intervals are by resampling the seeds of each size.

    Args:
        sizes: model settings by name; conf/model's own, which the yaml's defaults list brings.
        names: which of them are measured, in this order.
        batch_size: sequences a step, of the run's seq_len.
        warmup, repeats, max_seconds: as throughput's.
        train_tokens: tokens to train each size on, a step at least; null: none.
        learning_rates: of that training; every other setting of it is the run's own.
        num_search_seeds, num_seeds: trainings of each size and rate in the search, and of each size after it.
        warmup_steps: of the learning rate.

    Raises:
        UserError: a size that is none or is not there.
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
        "learning_rates": [2e-3],
        "num_search_seeds": 1,
        "num_seeds": 2,
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
        learning_rates: list[float],
        num_search_seeds: int,
        num_seeds: int,
        warmup_steps: int,
    ) -> None:
        check_counts("eval.scaling", batch_size=batch_size, warmup=warmup, repeats=repeats)
        check_value("eval.scaling.max_seconds", max_seconds, above=0)
        if train_tokens is not None:
            check_counts("eval.scaling", train_tokens=train_tokens)
        check_training("eval.scaling", learning_rates, "auto")
        check_counts("eval.scaling", num_search_seeds=num_search_seeds, num_seeds=num_seeds)
        if warmup_steps < 0:
            raise UserError(f"eval.scaling.warmup_steps={warmup_steps}: must be at least 0")
        known = {name: _settings(name, values) for name, values in sizes.items()}
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise UserError(f"eval.scaling.names={names}: there is no {name}, only {', '.join(known)}")
        self.sizes = {name: known[name] for name in dict.fromkeys(names)}
        self.batch_size, self.train_tokens = batch_size, train_tokens
        self.learning_rates, self.warmup_steps = learning_rates, warmup_steps
        self.num_search_seeds, self.num_seeds = num_search_seeds, num_seeds
        self.units = COSTS if train_tokens is None else COSTS | LOSS
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    @property
    def trains(self) -> bool:
        """True where sizes are trained to compare their losses."""
        return self.train_tokens is not None

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Size after size, and at the end the power law."""
        settle(subject)
        losses: dict[int, list[float]] = {}
        for name, model in self.sizes.items():
            settings = {"model": name}
            reason = self._refusal(subject, model)
            if reason is not None:
                yield from without_numbers(self.units, settings, "unsupported", reason)
                continue
            yield from self._costs(subject, model, settings)
            if self.train_tokens is not None:
                size = attempt(lambda model=model: self._losses(subject, model))
                if not isinstance(size, Size):
                    yield from without_numbers(LOSS, settings, "out_of_memory", size.reason)
                    continue
                if not any(trained.is_diverged for trained in size.scored):
                    losses[size.parameters] = [trained.nats for trained in size.scored]
                yield from size.rows(settings)
        if self.train_tokens is not None:
            yield from power_law(losses)

    def _refusal(self, subject: Subject, model: ModelSettings) -> str | None:
        """Return the reason why a size cannot be measured at all; None where it can."""
        try:
            subject.builder(model)
        except UserError as refusal:
            return str(refusal)
        if self.train_tokens is not None and not len(subject.corpus.tokens["test"]):
            return NO_TEST_SPLIT
        return lacks_text(subject, subject.seq_len, self.batch_size)

    def _costs(self, subject: Subject, model: ModelSettings, settings: dict[str, Any]) -> Iterator[Measurement]:
        how = {"length": subject.seq_len, "batch_size": self.batch_size, "repetition": self.repetition}
        cost = measure_step(subject, model=model, finds_compiled=True, **how)
        if isinstance(cost, OutOfMemory):
            yield from without_numbers(COSTS, settings, "out_of_memory", cost.reason)
            return
        yield Measurement(metric="parameters", value=cost.parameters, unit=COSTS["parameters"], settings=settings)
        yield time_row(cost.times, settings)
        yield cost.memory(settings)

    def _losses(self, subject: Subject, size: ModelSettings) -> "Size":
        """Search the rate of a size, then train and score it with all seeds."""
        searched: dict[float, float] = {}
        for rate in self.learning_rates if len(self.learning_rates) > 1 else ():
            seeds = range(SELECTION_SEED, SELECTION_SEED + self.num_search_seeds)
            trained = [self._train(subject, size, rate, seed, "validation") for seed in seeds]
            nats = math.inf if any(one.is_diverged for one in trained) else mean(one.nats for one in trained)
            searched[rate] = nats
        # Of equals the smaller: the first.
        rate = min(searched, key=searched.__getitem__, default=self.learning_rates[0])
        seeds = range(subject.seed, subject.seed + self.num_seeds)
        scored = [self._train(subject, size, rate, seed, "test") for seed in seeds]
        is_edge = len(searched) > 2 and rate in (self.learning_rates[0], self.learning_rates[-1])
        return Size(scored=scored, learning_rate=rate, rate_at_edge=is_edge)

    def _train(self, subject: Subject, size: ModelSettings, rate: float, seed: int, split: str) -> "Trained":
        """Train on `train_tokens` tokens, and take the loss on a split."""
        start_afresh(subject.device)
        corpus, tokens, length = subject.corpus, subject.corpus.tokens, subject.seq_len
        num_steps = max(1, (self.train_tokens or 0) // (self.batch_size * length))
        model = subject.new_model(size, seed)
        state = TrainState.fresh(model)
        batches = Batches(tokens["train"], length, self.batch_size, seed, subject.device)
        train(
            state,
            lambda step: text_batch(batches, step, size.dropout),
            replace(subject.train, learning_rate=rate, warmup_steps=self.warmup_steps),
            precision=subject.precision,
            num_steps=num_steps,
            hooks=[],
            compiled=subject.compile,
            captured=subject.compile and subject.device.type == "cuda",
        )
        text = evaluation_batches(tokens[split].to(subject.device), length, self.batch_size)
        nats_T, count_T = split_nats(model, text, subject.precision)
        nats = float(nats_T.sum() / count_T.sum())
        return Trained(
            parameters=model.num_parameters() - model.embedding.weight.numel(),
            nats=corpus.lengths(split, corpus.count(tokens[split][1:])).nats_per_character(nats),
            num_labels=round(float(count_T.sum())),
            num_skipped=num_steps - state.num_updates(),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class Trained:
    """Outcome of a training."""

    parameters: int
    """Without the embedding."""
    nats: float
    """A character, on the split that it was scored on."""
    num_labels: int
    num_skipped: int
    """Updates left out because their gradients were not finite."""

    @property
    def is_diverged(self) -> bool:
        return bool(self.num_skipped) or not math.isfinite(self.nats)


@dataclass(slots=True, kw_only=True, frozen=True)
class Size:
    """Outcome of the trainings of one size."""

    scored: list[Trained]
    """One a seed."""
    learning_rate: float
    rate_at_edge: bool

    @property
    def parameters(self) -> int:
        return self.scored[0].parameters

    def rows(self, settings: dict[str, Any]) -> Iterator[Measurement]:
        """Yield the number of parameters, and the mean loss with Student's 95 % interval over seeds."""
        name, unit = "non_embedding_parameters", LOSS["non_embedding_parameters"]
        yield Measurement(metric=name, value=self.parameters, unit=unit, settings=settings)
        settings = {**settings, "learning_rate": self.learning_rate, "rate_at_edge": self.rate_at_edge}
        row = partial(Measurement, metric="nats_per_character", unit="nat", settings=settings)
        for trained in self.scored:
            if trained.is_diverged:
                skipped = f"{trained.num_skipped} updates with gradients that were not finite"
                reason = f"{trained.nats:.4g} nats a character, {skipped}"
                yield row(value=None, status="diverged", reason=reason)
                return
        nats = [trained.nats for trained in self.scored]
        low, high = None, None
        if len(nats) > 1:
            from scipy.stats import sem, t

            low, high = (float(end) for end in t.interval(0.95, len(nats) - 1, loc=mean(nats), scale=sem(nats)))
        yield row(value=mean(nats), low=low, high=high, num_samples=self.scored[0].num_labels)


def power_law(losses: dict[int, list[float]]) -> Iterator[Measurement]:
    """Yield the rows of FIT, see Scaling.

    Args:
        losses: of each seed, by number of parameters.
    """
    if len(losses) < MIN_SIZES:
        reason = f"{len(losses)} sizes have a loss, and a power law with an irreducible loss needs {MIN_SIZES}"
        yield from without_numbers(FIT, {}, "unsupported", reason)
        return
    from scipy.stats import bootstrap

    parameters, samples = zip(*sorted(losses.items()), strict=True)

    def fitted(*samples: Any) -> np.ndarray:
        return fit_power_law(parameters, [float(np.mean(sample)) for sample in samples])

    ends = np.full((2, len(FIT)), np.nan)
    if min(map(len, samples)) > 1:
        resampled = bootstrap(samples, fitted, n_resamples=NUM_RESAMPLES, vectorized=False, method="percentile", rng=0)
        ends = np.array(resampled.confidence_interval)
    for (metric, unit), value, low, high in zip(FIT.items(), fitted(*samples), *ends, strict=True):
        low, high = (float(low), float(high)) if math.isfinite(low) else (None, None)
        yield Measurement(metric=metric, value=float(value), unit=unit, low=low, high=high, num_samples=len(losses))


def fit_power_law(parameters: Sequence[int], nats: Sequence[float]) -> np.ndarray:
    """Return exponent and irreducible loss of nats = irreducible + a N^-exponent, by least squares."""
    from scipy.optimize import least_squares

    ratio_S, nats_S = np.asarray(parameters) / parameters[0], np.asarray(nats)

    def errors(values: np.ndarray) -> np.ndarray:
        exponent, irreducible, scale = values
        return irreducible + scale * ratio_S**-exponent - nats_S

    half = nats_S.min() / 2
    # In units of the numbers themselves, whose sizes differ; no loss is below 0.
    fit = least_squares(errors, [0.2, half, nats_S[0] - half], bounds=(0, np.inf), x_scale="jac", xtol=1e-12)
    return fit.x[:2]


def _settings(name: str, values: Any) -> ModelSettings:
    """Read a size as conf/model has it."""
    group = f"eval.scaling.sizes.{name}"
    if not isinstance(values, dict):
        raise UserError(f"{group}={values}: must be the settings of a model, as in conf/model")
    return read(ModelSettings, values, group)
