"""JSON and yaml that a stranger may have written: bounded in size and depth, finite in its numbers, and no code."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from attnbench.errors import UserError

MOST_JSON_BYTES = 64 * 2**20
MOST_YAML_BYTES = 2**18
"""The parser is slow: this much takes it seconds, and a run's config.yaml has three thousand bytes."""

MOST_DIGITS = 300
"""Of a whole number: a longer one has no place among floating-point numbers."""


def read_bounded(path: Path, most_bytes: int) -> str:
    """The text of a file, unless it is longer than any that attnbench writes.

    Raises:
        UserError: it is.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return read_bounded_bytes(path, most_bytes).decode("utf-8")


def read_bounded_bytes(path: Path, most_bytes: int) -> bytes:
    """What a file holds; raises as `read_bounded`."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UserError(f"{path}: longer than the {most_bytes} bytes that such a file may have")
    return content


def parse_json(text: str) -> Any:
    """What `text` says.

    Raises:
        ValueError: it is no JSON, has a number that is not finite, or is nested deeper than the parser can go.
    """
    try:
        return json.loads(text, parse_float=finite_number, parse_int=whole_number, parse_constant=finite_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """What `text` says; of types other than JSON's only dates.

    Raises:
        ValueError: it is no yaml, or nested deeper than the parser can go.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Its constructors let through what they stumble over.
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def whole_number(text: str) -> int:
    """Raises ValueError for one that is no number, or too long to be computed with."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def finite_number(text: str) -> float:
    """Raises ValueError for NaN and infinities, however they are written."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number
