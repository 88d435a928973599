"""Colour, shape and dash of a variant: by its name, so that it looks alike in all reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

# Okabe and Ito's colours differ for all common kinds of colour vision; the last four are darker. Shapes differ too.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#6A3D9A", "#7A6A00", "#A50F3C", "#6B6B6B"),
)
COLOURS_ON_DARK = (
    *("#4DA6DB", "#EE7A33", "#1BBF92", "#DB93BA", "#E69F00", "#8CCBF2"),
    *("#B497E0", "#C2B23C", "#F0708F", "#B5B5B5"),
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [4, 1], [12, 4], [1, 3])

KNOWN = (
    *("softmax", "linear", "gated_deltanet", "mamba2", "kda", "deltanet", "mlstm", "softmax_nope", "flash", "retnet"),
    *("window", "gla", "simple_gla", "rwkv7", "hgrn2", "deltaproduct", "mamba3", "fox", "mla", "gdn2"),
    *("efla", "mamba", "lstm", "base_conv", "softmax_sigmoid", "gated_deltanet_softmax", "nope", "rotary"),
)
"""Names in the order of their looks. New ones are appended; another order would change the colours of reports."""

NUM_LOOKS = len(COLOURS) * len(SHAPES)


@dataclass(frozen=True, slots=True)
class Look:
    index: int

    @property
    def colour(self) -> str:
        return COLOURS[self.index % len(COLOURS)]

    @property
    def shape(self) -> str:
        return SHAPES[self.index % len(SHAPES)]

    @property
    def dash(self) -> list[int]:
        return DASHES[self.index % len(DASHES)]


def looks(variants: Sequence[str]) -> dict[str, Look]:
    """Give the later of two unknown names with one look the next free one."""
    found: dict[str, int] = {name: KNOWN.index(name) for name in variants if name in KNOWN}
    for name in variants:
        if name not in found:
            index = int(sha256(name.encode(errors="surrogatepass")).hexdigest(), 16) % NUM_LOOKS
            taken = {*found.values()} if len(found) < NUM_LOOKS else set()
            found[name] = next(at % NUM_LOOKS for at in range(index, index + NUM_LOOKS) if at % NUM_LOOKS not in taken)
    return {name: Look(found[name]) for name in variants}
