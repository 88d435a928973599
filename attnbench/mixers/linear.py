"""Linear attention: softmax's weights replaced by a product of features, so that the past fits into one matrix."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.machine.kernel_support import require_triton
from attnbench.mixers.base import Mixer, head_count
from attnbench.mixers.fla_support import require_fla
from attnbench.mixers.layers import GatedOutput, QueryKeyValue, RMSNorm
from attnbench.settings.errors import UserError


class LinearState(NamedTuple):
    """What linear attention remembers; its size does not depend on the length."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    history_BWC: Tensor


class LinearAttention(Mixer):
    """Linear attention with a normaliser (Katharopoulos et al., 2020; arXiv 2006.16236), per head:

        S_t = S_{t-1} + f(k_t) v_t^T,   z_t = z_{t-1} + f(k_t),   y_t = S_t^T f(q_t) / (f(q_t) . z_t + eps)

    Args:
        num_heads: null for dim / head_width; the inner width is num_heads × head_width.
        head_width: channels of query, key and value a head.
        backend: auto | torch | triton | fla. Triton is this bench's own kernel, for CUDA and a head_width of 16 to 128;
            auto takes it there and torch elsewhere. Changes the speed, not the result beyond rounding.
        feature_map: f, non-negative: elu (elu(x) + 1), relu, or softmax over the head's channels (Shen et al., 2021).
        conv_size: taps of a short convolution over query, key and value; 0 for none.
        output_gate: multiply what was mixed by silu(gate(x)).
        qk_norm: RMS norm of query and key over the head width, with a learned gain, before the feature map.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = "triton on CUDA at head widths of 16 to 128, otherwise torch"
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    chunk_size: ClassVar[int] = 64
    """Positions a chunk of the torch form. Changes the speed, not the result."""

    eps: ClassVar[float] = 1e-6
    """Keeps the quotient finite where every feature of a query is 0, as relu's can be."""

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        backend: str = "auto",
        feature_map: str = "elu",
        conv_size: int = 0,
        output_gate: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if feature_map not in ("elu", "relu", "softmax"):
            raise UserError(f"attn.feature_map={feature_map}: must be one of elu, relu, softmax")
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.backend = "torch" if backend == "auto" else backend
        self.feature_map = feature_map
        width = self.num_heads * head_width
        self.query_key_value = QueryKeyValue(dim, width, width, width, conv_size=conv_size)
        self.query_norm = RMSNorm(head_width) if qk_norm else None
        self.key_norm = RMSNorm(head_width) if qk_norm else None
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """As Mixer's; fla needs CUDA and the library, triton CUDA and a head_width that it has a kernel for."""
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        head_width = options.get("head_width")
        has_kernel = head_width is None or 16 <= head_width <= 128
        if options.get("backend", "auto") == "auto":
            return "triton" if has_kernel and device_type == "cuda" else "torch"
        if backend == "fla":
            require_fla("attn.backend=fla", device_type)
        if backend == "triton":
            require_triton("attn.backend=triton", device_type)
            if not has_kernel:
                raise UserError(
                    f"head_width={head_width}: attn.backend=triton has kernels for 16 to 128; choose such a width or "
                    "attn.backend=torch"
                )
        return backend

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """As Mixer's: `head_width`, a divisor of the model's width where the number of heads follows from it."""
        free = options.get("num_heads") is not None
        return [{"head_width": width} for width in range(1, dim + 1) if free or dim % width == 0]

    def forward(self, x_BTD: Tensor, state: LinearState | None = None) -> tuple[Tensor, LinearState | None]:
        mix = self._mix_packed if self.backend == "triton" else self._mix
        mixed_BTHV, memory_BHKV, normaliser_BHK = mix(x_BTD, state)
        if state is not None:
            state.memory_BHKV.copy_(memory_BHKV)
            state.normaliser_BHK.copy_(normaliser_BHK)
        return self.output(mixed_BTHV.flatten(2), x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        """The training forward by the recurrence, one position after the other: the ground truth of the tests."""
        query, key, value = self._features(x_BTD, None)
        memory_BHKV, normaliser_BHK, mixed = 0, 0, []
        for t in range(x_BTD.shape[1]):
            memory_BHKV = memory_BHKV + key[:, t, :, :, None] @ value[:, t, :, None, :]
            normaliser_BHK = normaliser_BHK + key[:, t]
            read_BHV = (query[:, t, :, None, :] @ memory_BHKV).squeeze(-2)
            total_BH = (query[:, t, :, None, :] @ normaliser_BHK[..., None]).squeeze((-2, -1))
            mixed.append(read_BHV / (total_BH[..., None] + self.eps))
        return self.output(torch.stack(mixed, dim=1).flatten(2), x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> LinearState:
        device, width = self.output.projection.weight.device, self.head_width
        shape, state_dtype = (batch_size, self.num_heads, width, width), _state_dtype(dtype)
        return LinearState(
            memory_BHKV=torch.zeros(shape, dtype=state_dtype, device=device),
            normaliser_BHK=torch.zeros(shape[:3], dtype=state_dtype, device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
        )

    def mixing_flops(self, length: int) -> int:
        """A position and head: 2KV to add to the memory, 2KV to read it, 2K for the normaliser's product."""
        width = self.head_width
        return length * self.num_heads * (4 * width * width + 2 * width)

    def _features(self, x_BTD: Tensor, history_BWC: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """f(query), f(key) and value, each (B, T, H, head_width)."""
        query, key, value = (
            part.unflatten(-1, (self.num_heads, self.head_width)) for part in self.query_key_value(x_BTD, history_BWC)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return feature(query, self.feature_map), feature(key, self.feature_map), value

    def _mix(self, x_BTD: Tensor, state: LinearState | None) -> tuple[Tensor, Tensor, Tensor]:
        """y of every head, the last memory and the last normaliser."""
        query, key, value = self._features(x_BTD, None if state is None else state.history_BWC)
        memory = None if state is None else state.memory_BHKV
        if self.backend == "fla":
            mixed_BTHV, last_memory = fla_linear_attention(query, key, value, memory)
        else:
            mixed_BTHV, last_memory = chunked_linear_attention(query, key, value, memory, self.chunk_size)
        # A sum over thousands of keys, so in float32 at least.
        normaliser_BTHK = key.to(_state_dtype(key.dtype)).cumsum(1)
        if state is not None:
            normaliser_BTHK = normaliser_BTHK + state.normaliser_BHK[:, None]
        total_BTH = (query * normaliser_BTHK).sum(-1)
        mixed_BTHV = (mixed_BTHV / (total_BTH[..., None] + self.eps)).to(value.dtype)
        return mixed_BTHV, last_memory, normaliser_BTHK[:, -1]

    def _mix_packed(self, x_BTD: Tensor, state: LinearState | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same by our kernel, which takes the projection as it is, and f itself where it comes right after it."""
        from attnbench.kernels.linear_attention import linear_attention

        history = None if state is None else state.history_BWC
        if self.query_norm is None and self.feature_map != "softmax":
            mixed_BTC, feature_map = self.query_key_value.packed(x_BTD, history), self.feature_map
        else:
            mixed_BTC = torch.cat([part.flatten(2) for part in self._features(x_BTD, history)], dim=-1)
            feature_map = "identity"
        memory, normaliser = (None, None) if state is None else state[:2]
        return linear_attention(mixed_BTC, memory, normaliser, self.num_heads, feature_map, self.eps)


def feature(x: Tensor, name: str) -> Tensor:
    """The feature map of that name; keeps shape and dtype, never negative."""
    if name == "elu":
        # Not elu(x) + 1, which below -6 is 0 in bfloat16: the normaliser makes features matter by their ratios.
        # Back to the dtype that came, because autocast takes exp to float32.
        return F.relu(x) + x.clamp(max=0).exp().to(x.dtype)
    if name == "relu":
        return F.relu(x)
    return x.softmax(-1, dtype=_state_dtype(x.dtype)).to(x.dtype)


def chunked_linear_attention(
    query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, memory_BHKV: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """y_t = S_t^T q_t with S_t = S_{t-1} + k_t v_t^T, by chunks: masked products within, a sum of states between.

    Args:
        memory_BHKV: the state before the first position; None for zeros.

    Returns:
        y (B, T, H, V) and the last state (B, H, K, V), the state in float32 at least.
    """
    length, state_dtype = query_BTHK.shape[1], _state_dtype(key_BTHK.dtype)
    size = min(chunk_size, length)
    padding = -length % size
    query, key, value = (
        # Positions of zeros at the end change no state. Layout: (B, H, N, chunk, channels).
        F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)
        for x in (query_BTHK, key_BTHK, value_BTHV)
    )
    within = (query @ key.mT).tril() @ value
    # Sums over the whole past: in float32 at least, whatever the products are in.
    memory_BHNKV = (key.mT @ value).to(state_dtype).cumsum(2)
    if memory_BHKV is not None:
        memory_BHNKV = memory_BHNKV + memory_BHKV[:, :, None]
        before = torch.cat([memory_BHKV[:, :, None], memory_BHNKV[:, :, :-1]], dim=2)
    else:
        before = F.pad(memory_BHNKV[:, :, :-1], (0, 0, 0, 0, 1, 0))
    mixed = within + query @ before.to(query.dtype)
    return mixed.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], memory_BHNKV[:, :, -1]


def fla_linear_attention(
    query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, memory_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same by flash-linear-attention's kernel; without its own normaliser, which carries no state of ours."""
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

    return chunk_linear_attn(
        query_BTHK,
        key_BTHK,
        value_BTHV,
        scale=1.0,
        initial_state=memory_BHKV,
        output_final_state=memory_BHKV is not None,
        normalize=False,
    )


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the model itself is."""
    return torch.promote_types(dtype, torch.float32)
