"""Tokenizer files that Hugging Face's AutoTokenizer loads, without code of ours: the characters of a vocabulary."""

import json
from collections.abc import Sequence
from typing import Any

OTHERWISE = "<unknown>"
"""Name of the unknown symbol where its own is a character of the corpus."""


def tokenizer_files(vocabulary: Sequence[str]) -> dict[str, str]:
    """Return the text of each file of a tokenizer by its name.

    Args:
        vocabulary: single characters by their tokens, and last the symbol for every other character.
    """
    *characters, unknown = vocabulary
    unknown = OTHERWISE if unknown in characters else unknown
    tokens = {symbol: token for token, symbol in enumerate([*characters, unknown])}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        # A piece a character, line ends included.
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": unknown},
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
