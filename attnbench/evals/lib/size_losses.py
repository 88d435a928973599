"""Losses of model sizes: a searched rate, and a training for each seed."""

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from attnbench.data.batches import Batches, evaluation_batches
from attnbench.evals.base import Subject
from attnbench.machine.device import start_afresh
from attnbench.model.loss import split_nats
from attnbench.results.rows import Measurement
from attnbench.settings.schema import SELECTION_SEED, ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import text_batch, train

LOSS = {"non_embedding_parameters": "", "nats_per_character": "nat"}


@dataclass(slots=True, kw_only=True, frozen=True)
class Trained:
    parameters: int
    """Without the embedding."""
    nats: float
    """A character, on the scored split."""
    num_labels: int
    num_skipped: int
    """Updates left out because their gradients were not finite."""

    @property
    def is_diverged(self) -> bool:
        return bool(self.num_skipped) or not math.isfinite(self.nats)


@dataclass(slots=True, kw_only=True, frozen=True)
class SizeTraining:
    subject: Subject
    size: ModelSettings
    num_tokens: int
    """Tokens to train on, a step at least."""
    batch_size: int
    learning_rates: list[float]
    warmup_steps: int
    num_search_seeds: int
    num_seeds: int

    def rows(self, settings: dict[str, Any]) -> list[Measurement]:
        """Search the rate, train with each seed, and return the size's parameters and its loss."""
        searched: dict[float, float] = {}
        for rate in self.learning_rates if len(self.learning_rates) > 1 else ():
            seeds = range(SELECTION_SEED, SELECTION_SEED + self.num_search_seeds)
            trained = [self.train(rate, seed, "validation") for seed in seeds]
            searched[rate] = math.inf if any(one.is_diverged for one in trained) else mean(one.nats for one in trained)
        # The first, smaller one of equals.
        rate = min(searched, key=searched.__getitem__, default=self.learning_rates[0])
        is_edge = len(searched) > 2 and rate in (self.learning_rates[0], self.learning_rates[-1])
        first = self.subject.seed
        scored = [self.train(rate, seed, "test") for seed in range(first, first + self.num_seeds)]
        name, unit = "non_embedding_parameters", LOSS["non_embedding_parameters"]
        parameters = Measurement(metric=name, value=scored[0].parameters, unit=unit, settings=settings)
        return [parameters, _loss(scored, {**settings, "learning_rate": rate, "rate_at_edge": is_edge})]

    def train(self, rate: float, seed: int, split: str) -> Trained:
        subject, length = self.subject, self.subject.seq_len
        start_afresh(subject.device)
        corpus, tokens = subject.corpus, subject.corpus.tokens
        num_steps = max(1, self.num_tokens // (self.batch_size * length))
        model = subject.new_model(self.size, seed)
        state = TrainState.fresh(model)
        batches = Batches(tokens["train"], length, self.batch_size, seed, subject.device)
        train(
            state,
            lambda step: text_batch(batches, step, self.size.dropout),
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
            parameters=model.num_parameters() - model.embedding.weight.numel() * (1 + self.size.untied),
            nats=corpus.lengths(split, corpus.count(tokens[split][1:])).nats_per_character(nats),
            num_labels=round(float(count_T.sum())),
            num_skipped=num_steps - state.num_updates(),
        )


def _loss(scored: list[Trained], settings: dict[str, Any]) -> Measurement:
    row = partial(Measurement, metric="nats_per_character", unit="nat", settings=settings)
    for trained in scored:
        if trained.is_diverged:
            skipped = f"{trained.num_skipped} updates with gradients that were not finite"
            return row(value=None, status="diverged", reason=f"{trained.nats:.4g} nats a character, {skipped}")
    nats, low, high = [trained.nats for trained in scored], None, None
    if len(nats) > 1:
        from scipy.stats import sem, t

        low, high = (float(end) for end in t.interval(0.95, len(nats) - 1, loc=mean(nats), scale=sem(nats)))
    return row(value=mean(nats), low=low, high=high, num_samples=scored[0].num_labels)
