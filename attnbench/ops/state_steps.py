"""One decoding step of a recurrent state without its mixer's projections, for benches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.recurrence import Recurrence
from attnbench.ops.delta.delta_rule import DELTA_RULE
from attnbench.ops.linear.linear_attention import EPS, LINEAR_ATTENTION, chunked_linear_attention, feature


class StepInputs(NamedTuple):
    query_B1HK: Tensor
    key_B1HK: Tensor
    value_B1HK: Tensor
    memory_BHKV: Tensor
    """Float32, as all states are."""
    normaliser_BHK: Tensor
    log_decay_B1H: Tensor
    beta_B1H: Tensor

    @property
    def kind(self) -> tuple[str, str, int]:
        query = self.query_B1HK
        return query.device.type, str(query.dtype).removeprefix("torch."), query.shape[-1]


@dataclass(slots=True, kw_only=True, frozen=True)
class StateStep:
    """Decoding step of one family of recurrences."""

    recurrence: Recurrence
    label: str
    """Name in messages."""
    prepare: Callable[[StepInputs], Callable[[], Tensor]]
    """Lay out the inputs and return the timed call, which computes y as any view of (B, H, V)."""
    define: Callable[[StepInputs], Tensor]
    """Compute y in float64, (B, 1, H, V)."""
    flops: int
    """Operations per number of the state."""

    def choose(self, device_type: str, precision: str, width: int) -> str:
        """Return the backend of `auto` for a number of channels per head."""
        return self.recurrence.backends.choose("auto", (width, width), device_type, precision)

    def refuse(self, device_type: str, precision: str, width: int) -> str | None:
        """Return why it cannot run, or None."""
        refused = precision == "float16" and self.choose(device_type, precision, width) == "triton"
        return f"{self.label}'s kernel takes float32 and bfloat16" if refused else None


def _linear(inputs: StepInputs) -> Callable[[], Tensor]:
    query, key, value, memory, normaliser, *_ = inputs
    if LINEAR.choose(*inputs.kind) == "triton":
        from attnbench.ops.linear.triton.linear_op import linear_attention

        mixed_B1C, num_heads = torch.cat([x.flatten(2) for x in inputs[:3]], dim=-1), query.shape[2]
        return lambda: linear_attention(mixed_B1C, memory, normaliser, num_heads, "elu", EPS)[0]

    def call() -> Tensor:
        query_features, key_features = feature(query, "elu"), feature(key, "elu")
        mixed_B1HV, _ = chunked_linear_attention(query_features, key_features, value, memory, 1)
        total_B1H = (query_features * (normaliser[:, None] + key_features)).sum(-1)
        return mixed_B1HV / (total_B1H[..., None] + EPS)

    return call


def _define_linear(inputs: StepInputs) -> Tensor:
    query, key, value, memory, normaliser = (x.double() for x in inputs[:5])
    query, key = feature(query, "elu"), feature(key, "elu")
    memory_BHKV = memory + key[:, 0, ..., None] * value[:, 0, ..., None, :]
    total_B1H1 = (query * (normaliser[:, None] + key)).sum(-1, keepdim=True)
    return (query[..., None, :] @ memory_BHKV[:, None])[..., 0, :] / (total_B1H1 + EPS)


def _unit_key(inputs: StepInputs) -> StepInputs:
    """Normalise the key, as the mixer does: a longer one would let the state grow."""
    key = inputs.key_B1HK
    return inputs._replace(key_B1HK=F.normalize(key.float(), dim=-1).to(key.dtype))


def _gated_delta(inputs: StepInputs) -> Callable[[], Tensor]:
    query, key, value, memory, _, log_decay, beta = _unit_key(inputs)
    if GATED_DELTA.choose(*inputs.kind) == "triton":
        from attnbench.ops.delta.triton.delta_step import gated_delta_rule_step

        # The kernel scales the query and changes its state.
        mixed_BC = torch.cat([x[:, 0].flatten(1) for x in (query * query.shape[-1] ** 0.5, key, value)], dim=-1)
        changed = memory.clone()
        return lambda: gated_delta_rule_step(mixed_BC, log_decay[:, 0], beta[:, 0], changed, False)
    return lambda: DELTA_RULE.define(query, key, value, log_decay, beta, memory)[0]


def _define_gated_delta(inputs: StepInputs) -> Tensor:
    query, key, value, memory, _, log_decay, beta = (x.double() for x in _unit_key(inputs))
    return DELTA_RULE.define(query, key, value, log_decay, beta, memory)[0]


LINEAR = StateStep(
    recurrence=LINEAR_ATTENTION, label="linear attention", prepare=_linear, define=_define_linear, flops=4
)
GATED_DELTA = StateStep(
    recurrence=DELTA_RULE, label="Gated DeltaNet", prepare=_gated_delta, define=_define_gated_delta, flops=6
)
STATE_STEPS = {"linear": LINEAR, "gated_deltanet": GATED_DELTA}
"""Steps by mixer name."""
