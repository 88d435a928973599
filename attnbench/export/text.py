"""Text as the tokens of a trained model, and what a text costs beyond its tokens."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnbench.data.vocabulary import decode, encode

BYTE_NATS = math.log(256)
"""Nats of one of 256 bytes that are equally likely."""
FIRST_CONTEXTS = ("\n", " ")


class Characters:
    """The characters of a vocabulary.

    An unknown character is the unknown symbol, by which a text says that a character follows byte by byte, and its
    UTF-8 bytes, each equally likely: so every text has a probability, and those of all texts sum up to at most 1.

    Args:
        vocabulary: of a `ModelRecord`.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.num_written = len(vocabulary) - 1
        """Tokens that a model may write, which come first: all but the unknown symbol and what pads an embedding."""

    def encode(self, text: str) -> Tensor:
        """Return the tokens, (T,) int64 on the CPU."""
        return torch.from_numpy(encode(text, self.vocabulary)).long()

    def decode(self, tokens_T: Tensor) -> str:
        """Return the text of tokens."""
        return decode(tokens_T, self.vocabulary)

    def extra_nats(self, text: str) -> float:
        """Return the nats of a text beyond those of its tokens: the bytes of its unknown characters."""
        known = frozenset(self.vocabulary[:-1])
        return BYTE_NATS * sum(len(c.encode("utf-8", "surrogatepass")) for c in text if c not in known)

    def first_context(self) -> str:
        """Return the text before the first character of a document: a line feed, where the vocabulary has none a
        space, without either the unknown symbol."""
        return next((text for text in FIRST_CONTEXTS if text in self.vocabulary[:-1]), self.vocabulary[-1])
