"""Primary metrics: the one number of an evaluation that verdicts are about."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnbench.settings.errors import UserError

KINDS = ("nats", "accuracy", "share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Primary:
    """The metric and the setting of an evaluation that variants are tested at; everything else is descriptive."""

    metric: str
    kind: str
    """nats: about normal over seeds, lower is better; accuracy: in 0..1; share: 1 for a seed that solved, else 0."""
    margin: float
    """Difference below which two scores are equivalent, in the metric's unit."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Only settings that contain these."""
    hardest: list[str] = field(default_factory=list)
    """Settings that order cells from easy to hard, the first weighing most; "-width": a smaller one is harder."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.metric}: kind {self.kind!r} must be one of {', '.join(KINDS)}")
        if not 0 < self.margin < math.inf:
            raise UserError(f"{self.metric}: margin={self.margin} must be above 0 and finite")

    @property
    def margin_text(self) -> str:
        """The margin in words: "1 % of perplexity"."""
        if self.kind == "nats":
            return f"{100 * math.expm1(self.margin):.3g} % of perplexity"
        return f"{self.margin:g} in {self.kind}"

    @property
    def higher_is_better(self) -> bool:
        """False for nats alone."""
        return self.kind != "nats"

    def takes(self, metric: str, settings: Mapping[str, Any]) -> bool:
        """Tell if a number of this metric and setting may be the primary one."""
        return metric == self.metric and self.settings.items() <= settings.items()

    def hardness(self, settings: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the key that orders settings from easy to hard."""
        return tuple(
            -settings[name[1:]] if name.startswith("-") else settings[name]
            for name in self.hardest
            if isinstance(settings.get(name.removeprefix("-")), int | float)
        )
