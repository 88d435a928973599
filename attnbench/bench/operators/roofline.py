"""The least time that work can take on a device: its operations and bytes against measured ceilings.

    floor = max(operations / fastest matrix product, bytes / fastest copy)

Bytes are those of inputs and outputs, once each; operations those of matrix products, without exponentials.
"""

from typing import Any, NamedTuple


class Ceilings(NamedTuple):
    tflops: float
    """TFLOP/s of a large matrix product in the precision of the table."""
    gigabytes_per_second: float
    """Read and written together by a large copy."""


class Work(NamedTuple):
    flops: float
    num_bytes: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        return max(self.flops / ceilings.tflops / 1e9, self.num_bytes / ceilings.gigabytes_per_second / 1e6)

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


def attention_work(shape: Any, itemsize: int) -> dict[str, Work]:
    """Return the work of attention's forward pass, its backward pass and both, by name.

    Forward: two products over the visible pairs; three tensors read, one written. Backward: five products, with the
    scores computed again; five read, three written.
    """
    length, channels = shape.sequence_length, shape.batch_size * shape.num_heads * shape.head_width
    product = 2 * channels * (length * (length + 1) // 2 if shape.causal else length**2)
    tensor = channels * length * itemsize
    forward, backward = Work(2 * product, 4 * tensor), Work(5 * product, 8 * tensor)
    return {"forward": forward, "backward": backward, "total": forward + backward}
