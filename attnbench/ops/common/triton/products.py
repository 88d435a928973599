"""Matrix products in kernels, for the GPU and for Triton's interpreter."""

import torch
import triton
import triton.language as tl

from attnbench.machine.device import interpreted

# Triton's interpreter multiplies the bits of bfloat16 as integers.
WIDEN = tl.constexpr(interpreted())


def float32_product() -> str:
    """Return the PRECISION of float32 products in torch: three TF32 products, which keep float32's digits, or one if
    torch may use TF32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def product_precision(dtype: torch.dtype) -> str:
    """Return the PRECISION of `product` for inputs of this dtype: float32 factors are truncated to TF32 beside
    half-precision inputs and rounded with float32 inputs."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if float32_product() == "tf32x3" else "rounded tf32"


@triton.jit
def _nearest(x):
    """Round float32 to TF32."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(left, right, PRECISION: tl.constexpr, sum=None):
    """Return left @ right + sum in float32, for factors of one dtype; PRECISION is that of float32 factors."""
    if WIDEN:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), sum, input_precision="ieee")
    elif PRECISION == "rounded tf32":
        # Tensor cores truncate to TF32, which biases all factors (docs/kernels.md).
        result = tl.dot(_nearest(left), _nearest(right), sum, input_precision="tf32")
    else:
        result = tl.dot(left, right, sum, input_precision=PRECISION)
    return result


@triton.jit
def tall_product(left, right, PRECISION: tl.constexpr, sum=None):
    """`product` in blocks of 32 rows if `left` has at least 64 rows and fewer than 64 columns: for these narrow tiles
    Triton would miscompile Hopper's four-warp instructions."""
    rows: tl.constexpr = left.shape[0]
    inner: tl.constexpr = left.shape[1]
    if rows > 32 and inner < 64:
        blocks: tl.constexpr = rows // 32
        repeated = tl.broadcast_to(right[None], (blocks, inner, right.shape[1]))
        in_blocks = sum if sum is None else tl.reshape(sum, (blocks, 32, right.shape[1]))
        result = product(tl.reshape(left, (blocks, 32, inner)), repeated, PRECISION, in_blocks)
        result = tl.reshape(result, (rows, right.shape[1]))
    else:
        result = product(left, right, PRECISION, sum)
    return result
