"""Tokenizers of what checkpoints and shards keep of them."""

from typing import Any

from attnbench.data.bpe import Bpe
from attnbench.data.tokenizer import Bytes, Characters, Tokenizer


def from_state(state: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer of its `state`, which may be a stranger's.

    Raises:
        ValueError: it is none.
        UserError: the package `tokenizers` is not installed, and it is needed.
    """
    match state:
        case {"kind": "characters", "vocabulary": list(vocabulary), **rest} if not rest:
            if any(not isinstance(symbol, str) or len(symbol) != 1 for symbol in vocabulary):
                raise ValueError("its vocabulary is no list of single characters")
            return Characters(vocabulary)
        case {"kind": "bytes", **rest} if not rest:
            return Bytes()
        case {"kind": "bpe", "tokenizer": dict(content), **rest} if not rest:
            return Bpe(content)
    raise ValueError("it is no tokenizer")
