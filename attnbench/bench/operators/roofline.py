"""The least time that work can take on a device: its operations and bytes against ceilings measured there.

    floor = max(operations / fastest matrix product, bytes / fastest copy)

Bytes are those of inputs and outputs, each read or written once; operations those of the matrix products. What else a
kernel computes, exponentials above all, is not counted, so that a share of the roofline is never flattering: at 16
channels a head a kernel may be as fast as its exponentials let it be and still stand far below 1.
"""

from typing import NamedTuple

import torch

from attnbench.machine.timing import copy_ceiling, matrix_product_ceiling


class Ceilings(NamedTuple):
    """Speeds that a device reaches where nothing holds it up."""

    tflops: float
    """TFLOP/s of a large matrix product in the precision of the table."""
    gigabytes_per_second: float
    """Read and written together by a large copy."""


class Work(NamedTuple):
    """Operations and bytes that a call cannot do without."""

    flops: float
    num_bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Milliseconds at the ceilings."""
        return max(self.flops / ceilings.tflops / 1e9, self.num_bytes / ceilings.gigabytes_per_second / 1e6)

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


def measure_ceilings(device: torch.device, precision: str) -> Ceilings:
    """Measure them, in a second or two; the device must be free."""
    return Ceilings(matrix_product_ceiling(device, precision), copy_ceiling(device))


def attention_work(
    *, batch_size: int, num_heads: int, length: int, head_width: int, causal: bool, itemsize: int
) -> dict[str, Work]:
    """Work of attention's forward pass, its backward pass and both in total, by name.

    Forward two products over the pairs of positions that see each other, reading query, key and value and writing the
    output; backward five, with the scores made again, reading the output and its gradient too and writing three
    gradients.
    """
    pairs = length * (length + 1) // 2 if causal else length**2
    product = 2 * batch_size * num_heads * pairs * head_width
    tensor = batch_size * num_heads * length * head_width * itemsize
    forward, backward = Work(2 * product, 4 * tensor), Work(5 * product, 8 * tensor)
    return {"forward": forward, "backward": backward, "total": forward + backward}
