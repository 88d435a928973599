"""The public functions of attnbench.ops, in a process without the rest of the package's libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attnbench import ops

BLOCKED = ("hydra", "omegaconf", "wandb", "datasets", "transformers")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def softmax(query, key, value, log_forget=None, *, window=None):
    shared_by, length = query.shape[2] // key.shape[2], query.shape[1]
    key, value = (x.repeat_interleave(shared_by, 2) for x in (key, value))
    score_BHTS = torch.einsum("bthk,bshk->bhts", query, key) / query.shape[3] ** 0.5
    past_TS = torch.arange(length)[:, None] - torch.arange(length)
    if log_forget is not None:
        total_BHT = log_forget.cumsum(1).mT
        score_BHTS = score_BHTS + total_BHT[..., None] - total_BHT[:, :, None]
    hidden_TS = (past_TS < 0) | (past_TS >= (window or length))
    return torch.einsum("bhts,bshk->bthk", score_BHTS.masked_fill(hidden_TS, -torch.inf).softmax(-1), value)


def linear(query, key, value):
    weight_BHTS = torch.einsum("bthk,bshk->bhts", F.elu(query) + 1, F.elu(key) + 1).tril()
    return torch.einsum("bhts,bshv->bthv", weight_BHTS / (weight_BHTS.sum(-1, keepdim=True) + 1e-6), value)


def recurrence(query, key, value, log_decay, beta=None, *, erases=True):
    """The delta rule, or the sum where beta is None, with a decay a head (B, T, H) or a channel."""
    repeats = value.shape[2] // query.shape[2]
    query, key = (x.repeat_interleave(repeats, 2) for x in (query / query.shape[3] ** 0.5, key))
    decay = log_decay.exp().reshape(*log_decay.shape[:3], -1, 1)
    state, rows = torch.zeros(*value.shape[:1], value.shape[2], key.shape[3], value.shape[3], dtype=value.dtype), []
    for t in range(query.shape[1]):
        state, written = decay[:, t] * state, value[:, t]
        if beta is not None:
            written = beta[:, t, :, None] * (written - torch.einsum("bhk,bhkv->bhv", key[:, t], state))
        state = state + key[:, t, :, :, None] * written[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(rows, 1)


def exponential(query, key, value, log_forget, log_write):
    total = log_forget.cumsum(1)
    log_weight = (total[:, :, None] - total[:, None] + log_write[:, None]).permute(0, 3, 1, 2)
    score = torch.einsum("bthk,bshk->bhts", query / query.shape[3] ** 0.5, key) * log_weight.exp().tril()
    score = score / score.sum(-1, keepdim=True).abs().clamp(min=1)
    return torch.einsum("bhts,bshv->bthv", score, value)


def turned(x):
    angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** -(torch.arange(0, x.shape[3], 2) / x.shape[3])
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def convolved(x, weight):
    return F.silu(sum(weight[:, i] * F.pad(x, (0, 0, 3 - i, 0))[:, : x.shape[1]] for i in range(4)))  # pyright: ignore


B, T, H, K, V = 2, 37, 4, 8, 6
HEADS = (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V))
SQUARE = (normal(B, T, H, K), normal(B, T, 2, K), normal(B, T, 2, K))
GROUPED = (normal(B, T, 2, K), normal(B, T, 2, K), normal(B, T, H, V))
UNIT = (normal(B, T, H, K), F.normalize(normal(B, T, H, K), dim=-1), normal(B, T, H, V))
DECAY, CHANNELS, BETA = F.logsigmoid(normal(B, T, H)), F.logsigmoid(normal(B, T, H, K)), normal(B, T, H).sigmoid()

CASES = {
    "softmax_attention": (ops.softmax_attention, softmax, SQUARE),
    "window": (lambda *x: ops.softmax_attention(*x, window=5), lambda *x: softmax(*x, window=5), SQUARE),
    "forgetting": (lambda *x: ops.softmax_attention(*x[:3], log_forget_BTH=x[3]), softmax, (*SQUARE, DECAY)),
    "linear_attention": (lambda *x: ops.linear_attention(*x)[0], linear, (HEADS[0], HEADS[1], SQUARE[0] + 1)),
    "gated_delta_rule": (lambda *x: ops.gated_delta_rule(*x)[0], recurrence, (*UNIT, DECAY, BETA)),
    "scalar_decay": (lambda *x: ops.scalar_decay(*x)[0], recurrence, (*GROUPED, DECAY)),
    "diagonal_decay": (lambda *x: ops.diagonal_decay(*x)[0], recurrence, (*HEADS, CHANNELS)),
    "diagonal_delta_rule": (lambda *x: ops.diagonal_decay(*x)[0], recurrence, (*UNIT, CHANNELS, BETA)),
    "mlstm": (lambda *x: ops.mlstm(*x)[0], exponential, (*HEADS, DECAY, normal(B, T, H))),
    "short_convolution": (lambda *x: ops.short_convolution(*x, silu=True), convolved, (normal(B, T, K), normal(K, 4))),
    "rms_norm": (
        ops.rms_norm,
        lambda x, w: w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        (normal(B, T, K), normal(K)),
    ),
    "swiglu": (ops.swiglu, lambda x: x[..., :K] * x[..., :K].sigmoid() * x[..., K:], (normal(B, T, 2 * K),)),
    "rotary": (ops.rotary, turned, (normal(B, T, H, K),)),
    "linear_cross_entropy": (
        lambda x, w: ops.linear_cross_entropy(x, w, torch.arange(T) % V),
        lambda x, w: -(x @ w.mT).log_softmax(-1)[torch.arange(T), torch.arange(T) % V].sum(),
        (normal(T, K), normal(V, K)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_its_definition_forward_and_backward(name):
    function, definition, inputs = CASES[name]
    # Angles are float32 in every dtype.
    tolerance = 1e-5 if name == "rotary" else 1e-9
    leaves = [x.clone().requires_grad_() for x in inputs]
    actual, expected = function(*leaves), definition(*leaves)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    weight = normal(*actual.shape) if actual.dim() else torch.tensor(2.0, dtype=actual.dtype)
    for own, other in zip(
        torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    "name", ["gated_delta_rule", "scalar_decay", "diagonal_delta_rule", "linear_attention", "mlstm"]
)
def test_a_state_carries_a_text_read_in_pieces(name):
    function = {"diagonal_delta_rule": ops.diagonal_decay}.get(name) or getattr(ops, name)
    inputs = CASES[name][2]
    whole, _ = function(*inputs)
    heads, widths = inputs[2].shape[2], (inputs[0].shape[3], inputs[2].shape[3])
    zeros = torch.zeros(B, heads, *widths, dtype=torch.float64)
    memory = {"linear_attention": (zeros, zeros[..., 0]), "mlstm": None}.get(name, zeros)
    pieces = []
    for piece in (slice(0, 20), slice(20, 36), slice(36, 37)):
        y, memory = function(*(x[:, piece] for x in inputs), memory=memory)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_functions_need_nothing_but_torch():
    program = f"""import sys
sys.modules.update(dict.fromkeys({BLOCKED}))
import test_functions as tests
for name in tests.CASES:
    tests.test_a_function_is_its_definition_forward_and_backward(name)
print(len(tests.CASES), [name for name in {BLOCKED} if sys.modules[name] is not None])
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split(maxsplit=1) == [str(len(CASES)), "[]\n"]


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="window"):
        ops.softmax_attention(*SQUARE, window=3, log_forget_BTH=DECAY)
