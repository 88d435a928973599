"""Prints the PTX of a matrix product of float32 tiles, as Triton compiles it for Hopper, which need not be here: with
factors rounded to TF32, and then with what kernels on bfloat16 take."""

import torch
import triton
import triton.language as tl
from triton import MockTensor

from attnbench.ops.common.triton.products import product, product_precision


@triton.jit
def multiply_kernel(left, right, output, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Write left @ right, (SIZE, SIZE) each and contiguous; output in float32."""
    rows = tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + rows[None, :]
    tl.store(output + places, product(tl.load(left + places), tl.load(right + places), PRECISION))


def main() -> None:
    from compiled_for import Driver

    triton.runtime.driver.set_active(Driver(90))
    tile = MockTensor.wrap_dtype(torch.float32)
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.float32, torch.bfloat16):
        compiled = multiply_kernel.warmup(tile, tile, tile, SIZE=64, PRECISION=product_precision(dtype), grid=(1,))
        print(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
