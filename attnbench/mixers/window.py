"""Sliding-window attention: softmax over the last positions alone, with a cache of the same size."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.mixers.softmax import AttentionState, Softmax
from attnbench.ops.attention.window_attention import AUTO_RULE, choose_beside_torch, window_attention, window_step
from attnbench.settings.options import option


class Window(Softmax):
    """Softmax attention (arXiv 1706.03762) within a sliding window (Longformer, arXiv 2004.05150; Mistral 7B, arXiv
    2310.06825), per head:

        y_t = sum_(t - window < s <= t) w_ts v_s,   w_ts proportional to exp(q_t . k_s / sqrt(K))

    Its cache has one slot for each position of the window; position t is in slot t mod window. There are no global
    positions.

    `backend` changes the speed, not the result beyond rounding. `torch` writes the weights out, block by block.
    `triton` and `flash_attn` are Flash's kernels, for CUDA alone; triton also decodes with its kernel.
    """

    window: int = option(64, "positions seen, the current one included", minimum=1)

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "flash_attn")
    auto_rule, choose = AUTO_RULE, staticmethod(choose_beside_torch)
    without_vmap: ClassVar[frozenset[str]] = frozenset({"flash_attn"})
    state_grows = False
    state_memory: ClassVar[tuple[str, ...]] = ("key_BSHK", "value_BSHK")

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `window`, up to the model's width, counted in float32 as memories are."""
        return [{"window": window} for window in range(1, dim + 1)]

    def forward(self, x_BTD: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState | None]:
        if state is None:
            return super().forward(x_BTD)
        start, length = int(state.position.item()), x_BTD.shape[1]
        end, device = start + length, x_BTD.device
        query_BTHK, *new = self.project(x_BTD, state.position, state.history_BWC)
        caches = (state.key_BSHK, state.value_BSHK)
        before_S = torch.arange(max(0, start - self.window + 1), start, device=device) % self.window
        kept_S = torch.arange(max(start, end - self.window), end, device=device) % self.window
        read = [torch.cat([cache[:, before_S], x.to(cache.dtype)], dim=1) for cache, x in zip(caches, new, strict=True)]
        mixed_BTHK = self.mix(query_BTHK.to(caches[0].dtype), *read)
        for cache, x_BSHK in zip(caches, read, strict=True):
            cache.index_copy_(1, kept_S, x_BSHK[:, -len(kept_S) :])
        state.position.fill_(end)
        return self.finish(mixed_BTHK.to(x_BTD.dtype), x_BTD), state

    def slot(self, position: Tensor) -> Tensor:
        return (position % self.window)[None]

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        return window_attention(query_BTHK, key_BSHK, value_BSHK, self.window, self.backend)

    def mix_newest(self, query_BTHK: Tensor, state: Any, x_BTD: Tensor) -> Tensor:
        return window_step(query_BTHK, state.key_BSHK, state.value_BSHK, state.position, self.backend)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> Any:
        return super().init_state(batch_size, self.window, dtype)
