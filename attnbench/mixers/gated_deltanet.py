"""Gated DeltaNet: a memory that decays, and in which each key overwrites what it points to."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.machine.kernel_support import require_triton
from attnbench.mixers.base import Mixer, head_count
from attnbench.mixers.fla_support import require_gated_fla
from attnbench.mixers.layers import GatedOutput, Projection, QueryKeyValue, RMSNorm
from attnbench.mixers.scan import affine_scan
from attnbench.settings.errors import UserError

MOST_FORGETTING = 30.0
"""Largest -log a_t. It leaves 1e-13 of the memory, nothing in float32. Beyond it sums of log decays over a chunk lose
the digits of the other positions in it, and on a GPU, which adds each in an order of its own, may not even fall."""


class GatedDeltaNetState(NamedTuple):
    """What Gated DeltaNet remembers; its size does not depend on the length."""

    memory_BHKV: Tensor
    history_BWC: Tensor


class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025; arXiv 2412.06464), per head, with M_0 = 0:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    q, k and v come through a short convolution and SiLU; a_t = exp(-exp(log_decay_rate) softplus(decay(x_t) +
    decay_bias)) as in Mamba-2, not below exp(-MOST_FORGETTING), b_t = sigmoid(beta(x_t)). What is read is RMS-normed a
    head before gate and projection.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. Triton, our own kernels, takes heads of 16, 32, 64, 128 and, in bfloat16,
            256 key channels and a multiple of 16 value channels; auto is triton for these on CUDA, and else torch.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        output_gate: multiply what was mixed by silu(gate(x)).
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        negative_eigenvalues: b_t in 0..2 instead of 0..1, so that the state can also be reflected (arXiv 2411.12537).
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = "triton on CUDA at key widths of 16, 32, 64, 128, in bfloat16 256, otherwise torch"
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        conv_size: int = 4,
        output_gate: bool = True,
        qk_norm: bool = True,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__()
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.value_width = round(head_width * value_expansion)
        if self.value_width < 1 or self.value_width != head_width * value_expansion:
            raise UserError(
                f"attn.value_expansion={value_expansion}: times head_width={head_width} must be a whole number"
            )
        self.backend = "torch" if backend == "auto" else backend
        self.qk_norm, self.max_beta = qk_norm, 2 if negative_eigenvalues else 1
        key_width, width = self.num_heads * head_width, self.num_heads * self.value_width
        self.query_key_value = QueryKeyValue(dim, key_width, key_width, width, conv_size=conv_size, activation=True)
        self.decay = Projection(dim, self.num_heads)
        self.beta = Projection(dim, self.num_heads)
        self.log_decay_rate = nn.Parameter(torch.empty(self.num_heads))
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))
        self.norm = RMSNorm(self.value_width)
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """As Mixer's; triton needs CUDA and widths that it has kernels for, fla CUDA, the library, and a Triton that
        compiles its gated kernels correctly."""
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        widths = _key_and_value_width(options)
        if options.get("backend", "auto") == "auto":
            possible = device_type == "cuda" and (widths is None or has_kernels(*widths, precision))
            return "triton" if possible else "torch"
        if backend == "triton":
            require_triton("attn.backend=triton", device_type)
            if widths is not None and not has_kernels(*widths, precision):
                raise UserError(
                    f"attn.backend=triton: kernels take heads of {', '.join(map(str, KEY_WIDTHS))} key channels, in "
                    f"bfloat16 also of {WIDE_KEYS}, and a multiple of 16 value channels, not {widths[0]} and "
                    f"{widths[1]:g} in {precision}; choose attn.backend=torch"
                )
        if backend == "fla":
            require_gated_fla("attn.backend=fla", device_type)
        return backend

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """As Mixer's: `value_expansion`, for whole numbers of value channels a head up to the model's width."""
        key_width = options.get("head_width", head_width)
        return [
            {"value_expansion": width // key_width if width % key_width == 0 else width / key_width}
            for width in range(1, dim + 1)
            # What the constructor asks of it; a quotient that floating point cannot undo is left out.
            if key_width * (width / key_width) == width
        ]

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Decays of 0.001 to 0.4 a position, spread evenly by ratio over the heads, the slowest first: time steps
        through softplus's inverse, times a rate of 1. Drawn, as in Mamba-2, it is luck whether a model of one head can
        remember the beginning of a sequence; and one that forgets slowly begins to learn recall sooner."""
        step_H = torch.logspace(math.log10(0.001), math.log10(0.4), self.num_heads)
        nn.init.zeros_(self.log_decay_rate)
        with torch.no_grad():
            # softplus(x) = step where x = log(exp(step) - 1), written so that a small step loses no digits.
            self.decay_bias.copy_(step_H + (-torch.expm1(-step_H)).log())

    def forward(
        self, x_BTD: Tensor, state: GatedDeltaNetState | None = None
    ) -> tuple[Tensor, GatedDeltaNetState | None]:
        history, memory = (None, None) if state is None else (state.history_BWC, state.memory_BHKV)
        if self.backend == "triton":
            mixed_BTHV, last_memory = self._mix_packed(x_BTD, history, memory)
        else:
            mixed_BTHV, last_memory = self._mix(self._inputs(x_BTD, history), memory)
        if state is not None and last_memory is not None:
            state.memory_BHKV.copy_(last_memory)
        return self._finish(mixed_BTHV, x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        """The training forward by the recurrence, one position after the other: the ground truth of the tests."""
        inputs = self._inputs(x_BTD, None)
        shape = (x_BTD.shape[0], self.num_heads, self.head_width, self.value_width)
        mixed_BTHV, _ = recurrent_gated_delta_rule(*inputs, inputs[3].new_zeros(shape))
        return self._finish(mixed_BTHV, x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> GatedDeltaNetState:
        shape = (batch_size, self.num_heads, self.head_width, self.value_width)
        device = self.decay.weight.device
        return GatedDeltaNetState(
            memory_BHKV=torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
        )

    def mixing_flops(self, length: int) -> int:
        """A position and head: 2KV each for M^T k, the outer product added to M, and M^T q. Decays are not counted."""
        return length * self.num_heads * 6 * self.head_width * self.value_width

    def _mix(self, inputs: Sequence[Tensor], memory_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """y of every head and the last memory, by torch or fla; a single position always by the definition."""
        query, key, value, log_decay, beta = inputs
        if self.backend == "fla":
            return fla_gated_delta_rule(query, key, value, log_decay, beta, memory_BHKV)
        if memory_BHKV is not None and query.shape[1] == 1:
            return recurrent_gated_delta_rule(query, key, value, log_decay, beta, memory_BHKV)
        num_positions = chunk_size(query.device.type)
        return chunked_gated_delta_rule(query, key, value, log_decay, beta, memory_BHKV, num_positions)

    def _mix_packed(
        self, x_BTD: Tensor, history_BWC: Tensor | None, memory_BHKV: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same by our kernels, which take query, key and value where the projection leaves them; the last memory
        is None where the one given has become it, as it does in a step."""
        mixed_BTC, (log_decay_BTH, beta_BTH) = self.query_key_value.packed(x_BTD, history_BWC), self._gates(x_BTD)
        if memory_BHKV is not None and x_BTD.shape[1] == 1:
            from attnbench.kernels.delta_rule_step import gated_delta_rule_step

            mixed_BHV = gated_delta_rule_step(
                mixed_BTC[:, 0], log_decay_BTH[:, 0], beta_BTH[:, 0], memory_BHKV, self.qk_norm
            )
            return mixed_BHV[:, None], None
        from attnbench.kernels.gated_delta_rule import gated_delta_rule

        return gated_delta_rule(
            mixed_BTC,
            log_decay_BTH,
            beta_BTH,
            memory_BHKV,
            num_heads=self.num_heads,
            key_width=self.head_width,
            unit_length=self.qk_norm,
            keep_memory=memory_BHKV is not None,
        )

    def _inputs(self, x_BTD: Tensor, history_BWC: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value, log decay and beta of every position."""
        query, key, value = self.query_key_value(x_BTD, history_BWC)
        query, key = (part.unflatten(-1, (self.num_heads, self.head_width)) for part in (query, key))
        scale = self.head_width**-0.5
        query = unit_length(query, scale) if self.qk_norm else query * scale
        key = unit_length(key) if self.qk_norm else key
        return query, key, value.unflatten(-1, (self.num_heads, self.value_width)), *self._gates(x_BTD)

    def _gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and beta of every position, in float32 at least."""
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        if x_BTD.shape[1] > 1:
            # One product: by themselves both are too narrow for a GPU's matrix units.
            both_BTH = F.linear(x_BTD, torch.cat([self.decay.weight, self.beta.weight])).to(dtype)
            decay_BTH, beta_BTH = both_BTH.chunk(2, dim=-1)
        else:
            # As in FeedForward: autocast keeps the cast weights of both, and a step casts none again.
            decay_BTH, beta_BTH = self.decay(x_BTD).to(dtype), self.beta(x_BTD).to(dtype)
        forgetting_BTH = self.log_decay_rate.to(dtype).exp() * F.softplus(decay_BTH + self.decay_bias)
        return -forgetting_BTH.clamp(max=MOST_FORGETTING), self.max_beta * beta_BTH.sigmoid()

    def _finish(self, mixed_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).flatten(2), x_BTD)


KEY_WIDTHS = (16, 32, 64, 128)
WIDE_KEYS = 256


def has_kernels(key_width: int, value_width: float, precision: str) -> bool:
    """Whether our Triton kernels take so many channels a head in this precision."""
    takes_keys = key_width in KEY_WIDTHS or (key_width == WIDE_KEYS and precision == "bfloat16")
    return takes_keys and value_width > 0 and value_width % 16 == 0


def _key_and_value_width(options: dict[str, Any]) -> tuple[int, float] | None:
    """Channels a head that the settings ask for; None where the model, which gives the head width, is not known yet."""
    key_width = options.get("head_width")
    return None if key_width is None else (key_width, key_width * options.get("value_expansion", 1))


def chunk_size(device_type: str) -> int:
    """Positions a chunk of the torch form: where it was fastest. Changes the speed, not the result.

    A GPU's matrix units want 64; on a CPU the (chunk, chunk) matrices cost memory traffic, which 32 halves.
    """
    return 32 if device_type == "cpu" else 64


def unit_length(x_BTHK: Tensor, scale: float = 1.0) -> Tensor:
    """scale × x / |x| over the last axis, the sum of squares in float32 at least; keeps the dtype."""
    wide = x_BTHK.to(torch.promote_types(x_BTHK.dtype, torch.float32))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6))).to(x_BTHK.dtype)


def recurrent_gated_delta_rule(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """The definition, position by position, in the memory's dtype; also how a single position is decoded.

    The query comes scaled. Returns y (B, T, H, V) in the value's dtype and the last memory.
    """
    query, key, value = (x.to(memory_BHKV.dtype) for x in (query_BTHK, key_BTHK, value_BTHV))
    decay_BTH, mixed = log_decay_BTH.exp(), []
    for t in range(query.shape[1]):
        memory_BHKV = decay_BTH[:, t, :, None, None] * memory_BHKV
        found_BHV = (key[:, t, :, None, :] @ memory_BHKV).squeeze(-2)
        change_BHV = beta_BTH[:, t, :, None] * (value[:, t] - found_BHV)
        memory_BHKV = memory_BHKV + key[:, t, :, :, None] @ change_BHV[:, :, None, :]
        mixed.append((query[:, t, :, None, :] @ memory_BHKV).squeeze(-2))
    return torch.stack(mixed, dim=1).to(value_BTHV.dtype), memory_BHKV


def chunked_gated_delta_rule(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_positions: int,
) -> tuple[Tensor, Tensor]:
    """The same by chunks: products and one triangular solve for all chunks at once, and a scan over their states.

    Within a chunk, c_i = g_1 + ... + g_i of log decays, and d_i = b_i (v_i - a_i M_{i-1}^T k_i) what position i adds:

        (I + L) d = b v - b exp(c) k S,            L_ij = b_i exp(c_i - c_j) k_i . k_j  for j < i
        d = U - W S,                               with both right-hand sides through (I + L)^-1
        y_i = exp(c_i) S^T q_i + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) d_j
        S' = exp(c_C) S + sum_j exp(c_C - c_j) k_j d_j^T

    Products run in the dtype of query, key and value; decays, the solve and the states in that of the log decay.

    Args:
        query_BTHK: scaled.
        memory_BHKV: the state before the first position; None for zeros.
        num_positions: of a chunk; see `chunk_size`.

    Returns:
        y (B, T, H, V) in the value's dtype and the last memory.
    """
    batch, length, heads, _ = query_BTHK.shape
    device_type = query_BTHK.device.type
    # Autocast would undo the choice of dtypes below. Where there is none, nothing: no trace that leaves it can be kept.
    is_autocast = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
        query, key, value, log_decay, beta = _chunks(
            min(num_positions, length), query_BTHK, key_BTHK, value_BTHV, log_decay_BTH, beta_BTH
        )
        cumulative = log_decay.cumsum(-1)
        if memory_BHKV is None:
            memory_BHKV = cumulative.new_zeros(batch, heads, key.shape[-1], value.shape[-1])
        read, write, weight = _within_chunks(query, key, value, cumulative, beta)
        state, change, last = _across_chunks(key, read, write, cumulative, memory_BHKV.flatten(0, 1))
        decayed = query * cumulative.exp().to(query.dtype)[..., None]
        mixed = torch.baddbmm(decayed @ state.to(query.dtype), weight, change)
    mixed = mixed.unflatten(0, (-1, batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return mixed[:, :length], last.unflatten(0, (batch, heads))


def _chunks(size: int, *inputs: Tensor) -> list[Tensor]:
    """Each (B, T, H, ...) as (N × B × H, size, ...); what pads the last chunk is zero and so changes no state."""
    chunks = []
    for x in inputs:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size))
        chunks.append(padded.unflatten(1, (-1, size)).movedim(1, 0).movedim(3, 2).flatten(0, 2))
    return chunks


def _within_chunks(
    query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-W, U and the weights of y in the docstring above; all arguments as (chunks, positions, ...)."""
    size, dtype = key.shape[1], key.dtype
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    # Masked before exp, where a future position's decay would overflow. In place, as on a CPU fresh memory is what
    # elementwise operations cost.
    decay = (cumulative[:, :, None] + (-cumulative)[:, None, :]).masked_fill_(later, -torch.inf).exp_()
    lower = (key @ key.mT) * decay * beta[..., None]
    identity = torch.eye(size, dtype=decay.dtype, device=key.device).expand_as(lower)
    # Only what is below the diagonal of `lower` is read.
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True) * beta[:, None, :]
    read = (inverse * -cumulative.exp()[:, None, :]).to(dtype) @ key
    weight = ((query @ key.mT) * decay).to(dtype)
    return read, inverse.to(dtype) @ value, weight


def _across_chunks(
    key: Tensor, read: Tensor, write: Tensor, cumulative: Tensor, initial_XKV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before every chunk, what its positions add, and the last state, from (N × X, positions, ...)."""
    remaining = key * (cumulative[:, -1:] - cumulative).exp().to(key.dtype)[..., None]
    decay, read, remaining, write = (
        x.to(cumulative.dtype).unflatten(0, (-1, initial_XKV.shape[0]))
        for x in (cumulative[:, -1].exp(), read, remaining, write)
    )
    states, change = affine_scan(decay, read, remaining, write, None, initial_XKV)
    return states[:-1].flatten(0, 1), change.flatten(0, 1).to(key.dtype), states[-1]


def fla_gated_delta_rule(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same by flash-linear-attention's kernel; the query comes scaled."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return chunk_gated_delta_rule(
        query_BTHK,
        key_BTHK,
        value_BTHV,
        g=log_decay_BTH,
        beta=beta_BTH,
        scale=1.0,
        initial_state=memory_BHKV,
        output_final_state=memory_BHKV is not None,
    )
