"""Matrix products in a kernel, as its interpreter can do them too."""

import triton
import triton.language as tl

from attnbench.kernels.support import interpreted

# Triton's interpreter multiplies the bits of bfloat16 as integers.
WIDEN = tl.constexpr(interpreted())


@triton.jit
def product(left, right, PRECISION: tl.constexpr, sum=None):
    """left @ right, plus `sum`, in float32; both have one dtype. PRECISION is what becomes of float32: "tf32" or
    "tf32x3"."""
    if WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sum, input_precision="ieee")
    return tl.dot(left, right, sum, input_precision=PRECISION)
