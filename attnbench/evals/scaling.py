"""Time, memory and, where trained, loss of a mixer over model sizes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import peak_row, time_row, without_numbers
from attnbench.evals.lib.size_losses import LOSS, SizeTraining
from attnbench.evals.lib.step_cost import Timed, lacks_text, measure_step, settle
from attnbench.evals.perplexity import NO_TEST_SPLIT
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import read
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.settings.schema import ModelSettings

COSTS = {"parameters": "", "step_milliseconds": "ms", "peak_memory_mib": "MiB"}


class Scaling(Timed, SystemEvaluation):
    """Cost of a training step over model sizes, each matched as the run is.

    With `train_tokens` every size has its learning rate searched on the validation split, and is trained with several
    seeds on that many characters; its loss is that of the test split.
    """

    sizes: dict = option(
        {},
        "the sizes that `names` can choose from, as conf/model has them",
        yamls=("model", "tiny", "1m", "4m", "12m", "27m"),
    )
    names: list = option(["1m", "4m", "12m", "27m"], "measured, in this order, each matched as the run's model is")
    batch_size: int = option(128, "sequences a step, of the run's seq_len", minimum=1)
    train_tokens: int | None = option(
        None,
        "characters that each size is trained on before its loss on the test split is taken; null: not trained",
        minimum=1,
    )
    learning_rates: list[float] = option(
        [1e-3, 2e-3, 4e-3, 8e-3],
        "of that training; of each size the one of the lowest validation loss is taken",
        distinct=True,
        rising=True,
        above=0,
    )
    num_search_seeds: int = option(3, "that each size's rates are searched with; none of them is scored", minimum=1)
    num_seeds: int = option(
        3, "that each size is trained and scored with: the run's seed and those after it", minimum=1
    )
    warmup_steps: int = option(100, "of the learning rate", minimum=0)

    own_sizes = True
    plots = (("step_milliseconds", "model"), ("peak_memory_mib", "model"), ("nats_per_character", "model"))
    headline = (Headline("step_milliseconds", "ms a step", axes=("model",)),)
    smoke = {
        **{"names": ["tiny", "1m"], "batch_size": 2, "warmup": 1, "repeats": 3, "max_seconds": 1.0},
        **{"learning_rates": [2e-3], "num_search_seeds": 1, "num_seeds": 2},
    }
    # Another order: a third size would take seconds.
    one_more = {"names": ["1m", "tiny"]}

    def __post_init__(self) -> None:
        known = {name: _size(name, values) for name, values in self.sizes.items()}
        for name in self.names:
            if not isinstance(name, str) or name not in known:
                raise UserError(f"eval.scaling.names={self.names}: there is no {name}, only {', '.join(known)}")
        self.models = {name: known[name] for name in dict.fromkeys(self.names)}

    @property
    def trains(self) -> bool:
        return self.train_tokens is not None

    def run(self, subject: Subject) -> Iterator[Measurement]:
        settle(subject)
        for name, model in self.models.items():
            settings, reason = {"model": name}, self._refusal(subject, model)
            if reason is not None:
                units = COSTS | LOSS if self.trains else COSTS
                yield from without_numbers(units, settings, "unsupported", reason)
                continue
            yield from self._costs(subject, model, settings)
            if self.train_tokens is None:
                continue
            training = SizeTraining(
                subject=subject,
                size=model,
                num_tokens=self.train_tokens,
                batch_size=self.batch_size,
                learning_rates=self.learning_rates,
                warmup_steps=self.warmup_steps,
                num_search_seeds=self.num_search_seeds,
                num_seeds=self.num_seeds,
            )
            rows = attempt(partial(training.rows, settings))
            if isinstance(rows, OutOfMemory):
                rows = without_numbers(LOSS, settings, "out_of_memory", rows.reason)
            yield from rows

    def _refusal(self, subject: Subject, model: ModelSettings) -> str | None:
        try:
            subject.builder(model)
        except UserError as refusal:
            return str(refusal)
        if self.trains and not len(subject.corpus.tokens["test"]):
            return NO_TEST_SPLIT
        return lacks_text(subject, subject.seq_len, self.batch_size)

    def _costs(self, subject: Subject, model: ModelSettings, settings: dict[str, Any]) -> Iterator[Measurement]:
        how = {"length": subject.seq_len, "batch_size": self.batch_size, "repetition": self}
        cost = measure_step(subject, model=model, finds_compiled=True, **how)
        if isinstance(cost, OutOfMemory):
            yield from without_numbers(COSTS, settings, "out_of_memory", cost.reason)
            return
        yield Measurement(metric="parameters", value=cost.parameters, unit=COSTS["parameters"], settings=settings)
        yield time_row(cost.times, settings)
        yield peak_row("peak_memory_mib", cost.peak_mib, settings)


def _size(name: str, values: Any) -> ModelSettings:
    group = f"eval.scaling.sizes.{name}"
    if not isinstance(values, dict):
        raise UserError(f"{group}={values}: must be the settings of a model, as in conf/model")
    return read(ModelSettings, values, group)
