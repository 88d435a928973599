"""Tokenizer files for Hugging Face's AutoTokenizer, without our code."""

import json
from typing import Any

from attnbench.data.bpe import BYTE_OF, Bpe
from attnbench.data.tokenizer import Characters, Tokenizer
from attnbench.settings.errors import UserError

OTHERWISE = tuple(map(chr, range(0xE000, 0xF900)))
"""Names of the unknown symbol if the corpus contains its own: characters for private use."""

EMPTY = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
}

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    content = content_of(tokenizer)
    unknown = content["model"].get("unk_token")
    # lm-evaluation-harness needs the first as context of a text without one and stops at the second; the unknown symbol
    # is never written.
    special = {} if unknown is None else dict.fromkeys(SPECIAL, unknown)
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps({**CONFIG, **special}, indent=2) + "\n",
    }


def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(tokenizer, Bpe):
        return tokenizer.content
    if isinstance(tokenizer, Characters):
        return _characters(tokenizer)
    if tokenizer.kind == "bytes":
        return _bytes()
    raise UserError(f"data.tokenizer={tokenizer.kind}: has no form that transformers loads, so it cannot be exported")


def _characters(tokenizer: Characters) -> dict[str, Any]:
    *characters, unknown = tokenizer.vocabulary
    unknown = next(name for name in (unknown, *OTHERWISE) if name not in characters)
    tokens = {symbol: token for token, symbol in enumerate([*characters, unknown])}
    return {
        **EMPTY,
        # One piece per character, including line ends.
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": unknown},
    }


def _bytes() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        **EMPTY,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": BYTE_OF, "merges": []},
    }
