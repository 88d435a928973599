"""Textbook softmax attention, with the T × T weights written out."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbench.machine.device import on_kernels
from attnbench.mixers.around import PARTS
from attnbench.mixers.options import options_of
from attnbench.mixers.shell import Shell
from attnbench.ops.attention.softmax_attention import attention_flops, decode, definition, materialised
from attnbench.ops.layers.rotary import rotate_both
from attnbench.settings.errors import UserError
from attnbench.settings.options import option


class AttentionState(NamedTuple):
    """Cache of keys and values, S = max_length positions of which `position` are filled; H counts key/value heads."""

    key_BSHK: Tensor
    value_BSHK: Tensor
    position: Tensor
    history_BWC: Tensor


class Softmax(Shell):
    """Causal attention with materialised weights: memory and time grow with the square of the length. Per head:

        y_t = sum_(s <= t) w_ts v_s,   w_ts proportional to exp(q_t . k_s / sqrt(K))

    num_heads × head_width must be dim. num_heads / num_key_value_heads query heads share a key/value head (Ainslie et
    al., 2023). `qk_norm` comes before the rotation (Henry et al., 2020; Dehghani et al., 2023).
    """

    num_key_value_heads: int | None = option(
        None, "key/value heads shared by query heads, a divisor of num_heads; null: num_heads", after="num_heads"
    )
    conv_on: list[str] | None = option(
        None,
        "of q, k and v those that the convolution acts on: [k]; null: all",
        after="conv_size",
        choices=PARTS,
        distinct=True,
    )
    rotary_theta = 10000.0

    auto_rule = "there is no other"
    state_grows = True
    fills_width: ClassVar[bool] = True
    """True if num_heads × head_width must be dim."""
    window: ClassVar[int | None] = None

    choose: ClassVar[Callable[..., str] | None] = None
    """Function that resolves `auto` and refuses kernels that cannot run; None: torch alone."""

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        if cls.choose is None:
            return backend
        given = {name: options.get(name, entry.default) for name, entry in options_of(cls).items()}
        sizes = {"window": given.get("window"), "head_width": options.get("head_width")}
        return cls.choose(given["backend"], **sizes, device_type=device_type, precision=precision)

    def check_options(self) -> None:
        super().check_options()
        if self.conv_on is not None and not self.conv_size:
            raise UserError(f"attn.conv_on={self.conv_on}: there is no convolution; attn.conv_size=4 gives it one")

    def widths(self) -> tuple[int, int, int]:
        self.groups = self.heads if self.num_key_value_heads is None else self.num_key_value_heads
        _check_heads(self.heads, self.groups, self.head_width, self.dim if self.fills_width else None)
        return self.heads * self.head_width, self.groups * self.head_width, self.groups * self.head_width

    def forward(self, x_BTD: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState | None]:
        if state is None:
            query_BTHK, key_BTHK, value_BTHK = self.project(x_BTD, 0, None)
            return self.finish(self.mix(query_BTHK, key_BTHK, value_BTHK), x_BTD), None
        query_BTHK, end = self.prefill(x_BTD, state)
        mixed_BTHK = self.mix(query_BTHK, state.key_BSHK[:, :end], state.value_BSHK[:, :end])
        return self.finish(mixed_BTHK.to(x_BTD.dtype), x_BTD), state

    def prefill(self, x_BTD: Tensor, state: Any) -> tuple[Tensor, int]:
        """Write T positions into the cache; return their queries, and the cache's new number of positions."""
        start, end = room_for(x_BTD.shape[1], state.position, state.key_BSHK.shape[1])
        query_BTHK, key_BTHK, value_BTHK = self.project(x_BTD, state.position, state.history_BWC)
        state.key_BSHK[:, start:end] = key_BTHK
        state.value_BSHK[:, start:end] = value_BTHK
        state.position.fill_(end)
        return query_BTHK.to(state.key_BSHK.dtype), end

    def step(self, x_BD: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """Mix one position. Nothing checks max_length."""
        query_BTHK, key_BTHK, value_BTHK = self.project(x_BD[:, None], state.position, state.history_BWC)
        index = self.slot(state.position)
        state.key_BSHK.index_copy_(1, index, key_BTHK.to(state.key_BSHK.dtype))
        state.value_BSHK.index_copy_(1, index, value_BTHK.to(state.value_BSHK.dtype))
        mixed_BTHK = self.mix_newest(query_BTHK.to(state.key_BSHK.dtype), state, x_BD[:, None])
        state.position.add_(1)
        return self.finish(mixed_BTHK.to(x_BD.dtype), x_BD[:, None])[:, 0], state

    def slot(self, position: Tensor) -> Tensor:
        """Return a position's index in the cache, (1,)."""
        return position[None]

    def mix_newest(self, query_BTHK: Tensor, state: Any, x_BTD: Tensor) -> Tensor:
        """Attend from `state.position` to the whole cache; (B, 1, H, K)."""
        return decode(query_BTHK, state.key_BSHK, state.value_BSHK, state.position, self.window, self.backend)

    def project(
        self, x_BTD: Tensor, position: Tensor | int, history_BWC: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value by heads, normed and rotated, for T positions from `position` on."""
        angles = self.positions(x_BTD, position)
        if angles is not None and not self.qk_norm and on_kernels(x_BTD):
            from attnbench.ops.layers.triton.rotary_kernels import split_rotated

            packed_BTC = self.query_key_value.packed(x_BTD, history_BWC)
            return split_rotated(packed_BTC, angles, self.heads, self.groups)
        query_BTHK, key_BTHK, value_BTHK = self.split_heads(x_BTD, history_BWC)
        return *rotate_both(self.query_norm(query_BTHK), self.key_norm(key_BTHK), angles), value_BTHK

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        """Attend from the last T of S positions to all S; (B, T, H, K)."""
        return materialised(query_BTHK, key_BSHK, value_BSHK, self.window)

    def finish(self, mixed_BTHK: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHK).flatten(2), x_BTD)

    def reference(self, x_BTD: Tensor) -> Tensor:
        query_BTHK, key_BTHK, value_BTHK = self.project(x_BTD, 0, None)
        return self.finish(definition(query_BTHK, key_BTHK, value_BTHK, self.window), x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> Any:
        device = self.output.projection.weight.device
        shape = (batch_size, max_length, self.groups, self.head_width)
        # Zeros: later positions have weight 0 in `step`, and 0 times uninitialised memory can be NaN.
        return AttentionState(
            key_BSHK=torch.zeros(shape, dtype=dtype, device=device),
            value_BSHK=torch.zeros(shape, dtype=dtype, device=device),
            position=torch.zeros((), dtype=torch.int64, device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
        )

    def mixing_flops(self, length: int) -> int:
        return attention_flops(length, self.heads, self.head_width, self.window)


def room_for(num_positions: int, position: Tensor, max_length: int) -> tuple[int, int]:
    """Return where the next positions begin and end in a cache; raise ValueError past its end."""
    start = int(position.item())
    end = start + num_positions
    if end > max_length:
        raise ValueError(f"position {end} is past the {max_length} that this state was made for")
    return start, end


def _check_heads(num_heads: int, num_groups: int, head_width: int, dim: int | None) -> None:
    if dim is not None and num_heads * head_width != dim:
        raise UserError(
            f"attn.num_heads={num_heads} × head_width={head_width} is {num_heads * head_width}, model.dim is {dim}: "
            "they must be equal; attn.num_heads=null takes as many heads as fit"
        )
    if num_groups < 1 or num_heads % num_groups:
        raise UserError(
            f"attn.num_key_value_heads={num_groups}: must divide the {num_heads} query heads; null takes as many"
        )
