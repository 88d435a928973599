"""Multi-head latent attention: keys and values of all heads come from one cached narrow latent."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbench.mixers.around import RotaryPositions, by_heads, head_norm
from attnbench.mixers.layers import Projection, RMSNorm
from attnbench.mixers.options import options_of
from attnbench.mixers.shell import Shell
from attnbench.mixers.softmax import room_for
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.ops.attention.softmax_attention import (
    KERNELS,
    attend,
    attention_flops,
    definition,
    fused,
    materialised,
    visible,
)
from attnbench.ops.layers.rotary import rotate
from attnbench.settings.errors import UserError
from attnbench.settings.options import option


class LatentState(NamedTuple):
    """Cache of latents and rotary keys, S = max_length positions of which `position` are filled."""

    latent_BSC: Tensor
    rotary_key_BSK: Tensor
    position: Tensor
    history_BWC: Tensor


class MLA(Shell):
    """Multi-head latent attention (DeepSeek-AI, 2024; arXiv 2405.04434), per head, with c_s a latent and p_s a rotary
    key that all heads share:

        y_t = sum_(s <= t) w_ts V c_s,   w_ts proportional to exp((q_t . U c_s + o_t . p_s) / sqrt(K + R))

    c = norm(latent(x)) has `latent_width` channels, U and V map it to the K channels of a head, and o_t and p_s have R
    rotary channels. Training and prefill compute keys U c_s and values V c_s. A step attends to the latents with U^T
    q_t, through one head of latent_width + R channels, and applies V to the result.

    The paper's query has a latent too (DeepSeek-V2-Lite's has none); its latent_width and R are 4 and 1/2 times a
    head's 128 channels. qk_norm covers a query's rotary channels and the rotary key.

    `backend` changes the speed, not the result beyond rounding. `torch` writes the weights out. `cudnn` and `triton`
    are Flash's kernels, with keys of K + R and values of K channels: cudnn takes multiples of 8 in bfloat16 on CUDA,
    triton up to 128 channels a key. A step is by torch.
    """

    latent_width: int | None = option(
        None, "channels of the latent that keys and values come from; null: model.dim / 2", after="num_heads", minimum=1
    )
    rotary_width: int = option(
        16,
        "rotary channels of a query head and of the key that all heads share, beside head_width others",
        after="latent_width",
        minimum=1,
    )
    rotary_theta: float | None = option(
        10000.0, "base of the rotary positions' wavelengths; null leaves the rotary channels as they are"
    )
    conv_size: int = option(0, "taps of a short convolution over query, latent and rotary key; 0: none")
    qk_norm: bool = option(False, "RMS norm of each head's query and of the rotary key; the latent is normed anyway")

    backends: ClassVar[tuple[str, ...]] = ("torch", "cudnn", "triton")
    auto_rule = "torch; the others have not been timed yet"
    without_vmap: ClassVar[frozenset[str]] = frozenset({"cudnn"})
    state_grows = True

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        if backend != "torch":
            width = options.get("head_width") or 8
            key_width = width + options.get("rotary_width", options_of(cls)["rotary_width"].default)
            for channels in (key_width, width):
                refusal = IMPLEMENTATIONS[KERNELS[backend]].refusal(device_type, precision, channels)
                if refusal is not None:
                    raise UserError(f"attn.backend={backend}: {refusal}; attn.backend=torch takes all")
        return backend

    def widths(self) -> tuple[int, int, int]:
        self.latent_channels = max(1, self.dim // 2) if self.latent_width is None else self.latent_width
        return self.heads * (self.head_width + self.rotary_width), self.rotary_width, self.latent_channels

    def add_parts(self) -> None:
        self.latent_norm = RMSNorm(self.latent_channels)
        self.up_key, self.up_value = (Projection(self.latent_channels, self.heads * self.head_width) for _ in range(2))
        self.query_norm = head_norm(self.head_width + self.rotary_width, self.qk_norm)
        self.key_norm = head_norm(self.rotary_width, self.qk_norm)
        self.positions = RotaryPositions(self.rotary_width, self.rotary_theta)
        self.move_last("query_norm", "key_norm", "positions", "norm", "output")

    def forward(self, x_BTD: Tensor, state: LatentState | None = None) -> tuple[Tensor, LatentState | None]:
        if state is None:
            return self._finish(self._attend(*self._inputs(x_BTD)), x_BTD), None
        start, end = room_for(x_BTD.shape[1], state.position, state.latent_BSC.shape[1])
        query_BTHK, rotary_key_BTK, latent_BTC = self._project(x_BTD, state.position, state.history_BWC)
        state.latent_BSC[:, start:end] = latent_BTC
        state.rotary_key_BSK[:, start:end] = rotary_key_BTK
        state.position.fill_(end)
        key_BSHK, value_BSHV = self._up(state.rotary_key_BSK[:, :end], state.latent_BSC[:, :end])
        mixed_BTHV = self._attend(query_BTHK.to(key_BSHK.dtype), key_BSHK, value_BSHV)
        return self._finish(mixed_BTHV.to(x_BTD.dtype), x_BTD), state

    def step(self, x_BD: Tensor, state: LatentState) -> tuple[Tensor, LatentState]:
        """Mix one position with absorbed up-projections. Nothing checks max_length."""
        query_BTHK, rotary_key_BTK, latent_BTC = self._project(x_BD[:, None], state.position, state.history_BWC)
        dtype, index = state.latent_BSC.dtype, state.position[None]
        state.latent_BSC.index_copy_(1, index, latent_BTC.to(dtype))
        state.rotary_key_BSK.index_copy_(1, index, rotary_key_BTK.to(dtype))
        own_BTHK, rotary_BTHK = query_BTHK.to(dtype).split([self.head_width, self.rotary_width], dim=-1)
        up_key_HKC, up_value_HVC = (
            up.weight.to(dtype).unflatten(0, (self.heads, -1)) for up in (self.up_key, self.up_value)
        )
        absorbed_BTHC = torch.einsum("bthk,hkc->bthc", own_BTHK, up_key_HKC)
        key_BSC = torch.cat([state.latent_BSC, state.rotary_key_BSK], dim=-1)
        # `attend` divides by the root of the absorbed width, the definition by that of K + R.
        scale = (key_BSC.shape[-1] / (self.head_width + self.rotary_width)) ** 0.5
        query_BTHC = torch.cat([absorbed_BTHC, rotary_BTHK], dim=-1) * scale
        past_S = state.position - torch.arange(key_BSC.shape[1], device=x_BD.device)
        caches = key_BSC[:, :, None], state.latent_BSC[:, :, None]
        read_BTHC = attend(query_BTHC, *caches, visible(past_S, None)[None])
        mixed_BTHV = torch.einsum("bthc,hvc->bthv", read_BTHC, up_value_HVC)
        state.position.add_(1)
        return self._finish(mixed_BTHV.to(x_BD.dtype), x_BD[:, None])[:, 0], state

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self._finish(definition(*self._inputs(x_BTD), None), x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> LatentState:
        device = self.up_key.weight.device
        # Zeros: later positions have weight 0 in `step`, and 0 times uninitialised memory can be NaN.
        return LatentState(
            latent_BSC=torch.zeros(batch_size, max_length, self.latent_channels, dtype=dtype, device=device),
            rotary_key_BSK=torch.zeros(batch_size, max_length, self.rotary_width, dtype=dtype, device=device),
            position=torch.zeros((), dtype=torch.int64, device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
        )

    def mixing_flops(self, length: int) -> int:
        widths = {"head_width": self.head_width + self.rotary_width, "value_width": self.head_width}
        return attention_flops(length, self.heads, **widths)

    def _inputs(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_BTHK, rotary_key_BTK, latent_BTC = self._project(x_BTD, 0, None)
        return query_BTHK, *self._up(rotary_key_BTK, latent_BTC)

    def _project(
        self, x_BTD: Tensor, position: Tensor | int, history_BWC: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, (B, T, H, K + R), rotary key, (B, T, R), and latent, all normed and rotated."""
        query, rotary_key_BTK, latent_BTC = self.query_key_value(x_BTD, history_BWC)
        (query_BTHK,) = by_heads((query,), self.head_width + self.rotary_width)
        query_BTHK, rotary_key_BTK = self.query_norm(query_BTHK), self.key_norm(rotary_key_BTK)
        angles = self.positions(x_BTD, position)
        if angles is not None:
            own_BTHK, rotary_BTHK = query_BTHK.split([self.head_width, self.rotary_width], dim=-1)
            query_BTHK = torch.cat([own_BTHK, rotate(rotary_BTHK, angles)], dim=-1)
            rotary_key_BTK = rotate(rotary_key_BTK[:, :, None], angles)[:, :, 0]
        return query_BTHK, rotary_key_BTK, self.latent_norm(latent_BTC)

    def _up(self, rotary_key_BSK: Tensor, latent_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, the shared rotary channels last, and values."""
        key_BSHK, value_BSHV = by_heads((self.up_key(latent_BSC), self.up_value(latent_BSC)), self.head_width)
        shared_BSHK = rotary_key_BSK[:, :, None].to(key_BSHK.dtype).expand(-1, -1, self.heads, -1)
        return torch.cat([key_BSHK, shared_BSHK], dim=-1), value_BSHV

    def _attend(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor) -> Tensor:
        if self.backend == "torch":
            return materialised(query_BTHK, key_BSHK, value_BSHV, None)
        return fused(query_BTHK, key_BSHK, value_BSHV, None, self.backend)

    def _finish(self, mixed_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).flatten(2), x_BTD)
