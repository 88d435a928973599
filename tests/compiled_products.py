"""Prints the PTX of a matrix product in TF32, as Triton compiles it for Hopper, which need not be here, of float32
tiles and then of bfloat16's."""

import torch
import triton
import triton.language as tl
from triton import MockTensor

from attnbench.kernels.products import product


@triton.jit
def multiply_kernel(left, right, output, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Write left @ right, (SIZE, SIZE) each and contiguous; output in float32."""
    rows = tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + rows[None, :]
    tl.store(output + places, product(tl.load(left + places), tl.load(right + places), PRECISION))


def main() -> None:
    from compiled_for import Driver

    triton.runtime.driver.set_active(Driver(90))
    for dtype in (torch.float32, torch.bfloat16):
        factor, result = MockTensor.wrap_dtype(dtype), MockTensor.wrap_dtype(torch.float32)
        compiled = multiply_kernel.warmup(factor, factor, result, SIZE=64, PRECISION="tf32", grid=(1,))
        print(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
