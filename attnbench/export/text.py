"""Texts as tokens of a trained model, and the cost of unknown characters."""

import math

import numpy as np
import torch
from torch import Tensor

from attnbench.data.tokenizer import Tokenizer

BYTE_NATS = math.log(256)
"""Nats of one of 256 equally likely bytes."""

FIRST_CONTEXTS = ("\n", " ")


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """Return (T,) int64 on the CPU."""
    return torch.from_numpy(tokenizer.encode(text).astype(np.int64))


def split(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of a context and of its continuation, which begins where the joint tokens differ from the
    context's own."""
    alone_T, whole_T = encode(tokenizer, context), encode(tokenizer, context + continuation)
    size = min(len(alone_T), len(whole_T))
    num_common = int((alone_T[:size] == whole_T[:size]).long().cumprod(0).sum())
    return whole_T[:num_common], whole_T[num_common:]


def extra_nats(tokenizer: Tokenizer, text: str) -> float:
    """Return the nats of a text beyond those of its tokens: log 256 for each byte of unknown characters, so that the
    probabilities of all texts sum up to at most 1."""
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    return BYTE_NATS * int(num_bytes - tokenizer.num_bytes_V[tokenizer.encode(text)].sum())


def first_context(tokenizer: Tokenizer) -> str:
    """Return the text before a document: a line feed, a space, or the unknown symbol, whichever is known first."""
    unknown = tokenizer.decode([tokenizer.size - 1])
    return next((text for text in FIRST_CONTEXTS if not extra_nats(tokenizer, text)), unknown)
