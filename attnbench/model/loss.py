"""Cross-entropy as sums of nats and counts, so that means are taken once, over everything."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.machine.device import on_kernels
from attnbench.machine.precision import computing
from attnbench.model.language_model import Embedding, LanguageModel
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.results.rows import MAX_NUMBER


def cross_entropy(logits_BTC: Tensor, targets_BT: Tensor, weight_BT: Tensor | None = None) -> Tensor:
    """Return the sum of -log p(target) in nats, in float32 at least; targets of weight 0 are absent."""
    # A sum of exponentials in bfloat16 has two digits.
    logits_NC = logits_BTC.flatten(0, -2).to(accumulation_dtype(logits_BTC.dtype))
    if weight_BT is None:
        return F.cross_entropy(logits_NC, targets_BT.flatten(), reduction="sum")
    nats_N = F.cross_entropy(logits_NC, targets_BT.flatten(), reduction="none")
    return (nats_N * weight_BT.flatten()).sum()


def nats_of(embedding: Embedding, hidden: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return `cross_entropy` of the logits of `hidden` (..., D), without all logits in memory on a GPU."""
    if not on_kernels(hidden):
        return cross_entropy(F.linear(hidden, embedding.weight), targets, weight)
    from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy

    flat_weight = weight.flatten() if weight is not None else None
    return linear_cross_entropy(
        hidden.flatten(0, -2), embedding.weight, targets.flatten(), flat_weight, torch.is_grad_enabled()
    )[0]


def perplexity(nats: float) -> float:
    """Return exp(nats), infinite beyond the largest number of a row."""
    return math.exp(nats) if nats <= math.log(MAX_NUMBER) else math.inf


@torch.no_grad()
def split_nats(
    model: LanguageModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], precision: str
) -> tuple[Tensor, Tensor]:
    """Return sums of nats and numbers of tokens of a split by position in the block, two (T,) float64 on the CPU.

    Args:
        batches: (inputs_BT, targets_BT, weight_BT), absent tokens with weight 0.
        precision: of the forward pass, see `computing`.
    """
    nats_T, count_T = torch.zeros(1), torch.zeros(1)
    for nats_BT, weight_BT in _batch_nats(model, batches, precision):
        # In float64: a million characters lose the seventh digit in float32.
        nats_T = nats_T.to(nats_BT.device) + (nats_BT * weight_BT).double().sum(0)
        count_T = count_T.to(nats_BT.device) + weight_BT.double().sum(0)
    return nats_T.cpu(), count_T.cpu()


@torch.no_grad()
def character_nats(model: LanguageModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], precision: str) -> Tensor:
    """Return the nats of each token of a split in order, (N,) float32 on the CPU; arguments of `split_nats`."""
    parts = [nats_BT[weight_BT > 0].cpu() for nats_BT, weight_BT in _batch_nats(model, batches, precision)]
    return torch.cat(parts) if parts else torch.empty(0)


def _batch_nats(
    model: LanguageModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], precision: str
) -> Iterator[tuple[Tensor, Tensor]]:
    was_training = model.training
    model.eval()
    for inputs_BT, targets_BT, weight_BT in batches:
        with computing(precision, inputs_BT.device):
            logits_BTC, _ = model(inputs_BT)
        nats_N = F.cross_entropy(logits_BTC.flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
        yield nats_N.view_as(weight_BT), weight_BT
    model.train(was_training)
