"""Examples of input and target, from the docstring of an evaluation's class.

A docstring has them as lines "label  input  a b <sep>  target  . . a", or with input and target on lines of their
own.
"""

import re
from collections.abc import Sequence

from attnbench.report.blocks import Example

MAX_EXAMPLES = 3


def example_lines(cls: type) -> list[str]:
    """Return the first indented block with an input and a target."""
    blocks = re.split(r"\n[ \t]*\n", cls.__doc__ or "")
    wanted = (it for it in blocks if re.search(r"\binput {2,}", it) and re.search(r"\btarget {2,}", it))
    return [line.strip() for line in next(wanted, "").splitlines() if line.strip()]


def examples(lines: Sequence[str]) -> list[Example]:
    found: list[Example] = []
    label, inputs = "", None
    for line in lines:
        start = re.search(r"\binput {2,}", line)
        end = re.search(r"\btarget {2,}", line)
        if start:
            label = line[: start.start()].strip()
            inputs = line[start.end() : end.start() if end else None].split()
        if end and inputs:
            targets = line[end.end() :].split()
            size = max(len(inputs), len(targets))
            pads = ([*side, *["."] * (size - len(side))] for side in (inputs, targets))
            found.append(Example(label, [(given, wanted) for given, wanted in zip(*pads, strict=True)]))
            inputs = None
    return found[:MAX_EXAMPLES]
