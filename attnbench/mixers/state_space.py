"""Base of Mamba-2 and Mamba-3: all heads share query and key, of `state_width` channels, and the value has a skip."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnbench.mixers.base import head_count
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import at_least_float32
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option


class StateSpace(RecurrentMixer):
    """In the papers' letters k is B, q is C, v is x and skip is D; K is N, and V is P."""

    num_heads: int | None = option(None, "heads of head_width values; null: 2 model.dim / head_width")
    value_expansion: ClassVar[float] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    state_width: int = option(128, "channels of query and key, which all heads share", after="num_heads")

    decays = True
    least_width: ClassVar[int] = 1

    @classmethod
    def kernel_widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        return options.get("state_width", 128), options["head_width"]

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        step = 1 if options.get("rotary_theta") is None else 2
        return [{"state_width": width} for width in range(max(step, cls.least_width), dim + 1, step)]

    @property
    def scale(self) -> float:
        return 1.0

    def sizes(self) -> tuple[int, int, int]:
        check_value("attn.state_width", self.state_width, minimum=self.least_width)
        if self.rotary_theta is not None and self.state_width % 2:
            raise UserError(
                f"attn.state_width={self.state_width}, attn.rotary_theta={self.rotary_theta}: rotary positions need an "
                "even width; attn.rotary_theta=null leaves them out"
            )
        heads = head_count(self.num_heads, self.dim, self.head_width)
        return heads if self.num_heads is not None else 2 * heads, self.state_width, self.head_width

    def widths(self) -> tuple[int, int, int]:
        return self.key_width, self.key_width, self.heads * self.value_width

    def add_skip(self) -> None:
        self.skip = nn.Parameter(torch.empty(self.heads))

    def finish(self, mixed_BTHV: Tensor, inputs: tuple[Any, ...], gate_BTD: Tensor) -> Tensor:
        # In float32 at least: before a norm most of the skip's gradient cancels.
        return super().finish(mixed_BTHV + at_least_float32(inputs[2]) * self.skip[:, None], inputs, gate_BTD)
