"""Language models that benches time: initial weights, parameters matched to those of softmax."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from attnbench.bench.base import Conditions, Missing, attempted, rows_or_reason
from attnbench.evals.lib.rows import without_numbers
from attnbench.model.building import build_model, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import Matched, match_model
from attnbench.results.rows import Measurement
from attnbench.settings.check import check
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRECISIONS, MixerSettings, ModelSettings


def model_of(size: list[Any], setting: str, name: str = "bench") -> ModelSettings:
    """Read [width, feed-forward width, layers, heads]; errors name `setting`."""
    if len(size) != 4 or not all(type(part) is int and part > 0 for part in size) or size[0] % size[3]:
        raise UserError(f"{setting}={size}: must be [width, feed-forward width, layers, heads], heads dividing width")
    dim, feed_forward_width, num_layers, num_heads = size
    shape = {"num_layers": num_layers, "head_width": dim // num_heads, "feed_forward_width": feed_forward_width}
    model = ModelSettings(name=name, dim=dim, **shape)
    check(model, f"{setting}: ")
    return model


def resolved(mixer: MixerSettings, size: ModelSettings, conditions: Conditions) -> MixerSettings:
    return resolve_mixer(mixer, size, device_type=conditions.device.type, precision=conditions.precision)


def by_mixer(
    names: Sequence[str],
    size: ModelSettings,
    units: dict[str, str],
    cell: dict[str, Any],
    conditions: Conditions,
    measure: Callable[[MixerSettings, dict[str, Any]], Iterable[Measurement]],
) -> Iterator[Measurement]:
    """Yield the rows of each mixer, or rows without a number; `measure` gets the resolved mixer and its settings."""
    for mixer in conditions.mixers(names):
        settings = cell | {"implementation": mixer.name, "backend": ""}
        chosen = attempted(partial(resolved, mixer, size, conditions))
        if isinstance(chosen, Missing):
            yield from without_numbers(units, settings, *chosen)
            continue
        settings |= {"backend": chosen.options["backend"]}
        yield from rows_or_reason(units, settings, partial(measure, chosen, settings))


@dataclass(kw_only=True)
class Candidate:
    """A mixer, its backend resolved, in a model whose feed-forward width meets softmax's parameters."""

    mixer: MixerSettings
    size: ModelSettings
    vocabulary_size: int
    length: int
    """Positions, for the count of operations."""
    conditions: Conditions

    @property
    def label(self) -> str:
        return f"{self.mixer.name} ({self.mixer.options['backend']})"

    @cached_property
    def matched(self) -> Matched:
        return match_model(
            [self.mixer] * self.size.num_layers,
            self.size,
            match="params",
            seq_len=self.length,
            vocabulary_size=self.vocabulary_size,
            precision=self.conditions.precision,
        )

    def build(self) -> LanguageModel:
        """Build a new model, the same at every call."""
        return build_model(
            self.matched.mixers,
            self.matched.model,
            vocabulary_size=self.vocabulary_size,
            seed=0,
            device=self.conditions.device,
        )


def candidate_of(
    name: str,
    conditions: Conditions,
    *,
    size: ModelSettings,
    vocabulary_size: int,
    length: int,
    use: str,
    backend: str | None = None,
) -> Candidate:
    """Return the mixer of a yaml of conf/attn in a model of this size; `use` is a verb for errors."""
    if conditions.precision not in PRECISIONS:
        raise UserError(f"precision={conditions.precision}: models {use} in {', '.join(PRECISIONS)}")
    (mixer,) = conditions.mixers([name])
    if backend is not None:
        mixer = replace(mixer, options={**mixer.options, "backend": backend})
    return Candidate(
        mixer=resolved(mixer, size, conditions),
        size=size,
        vocabulary_size=vocabulary_size,
        length=length,
        conditions=conditions,
    )
