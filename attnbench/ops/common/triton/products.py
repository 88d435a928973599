"""Matrix products in a kernel, as its interpreter can do them too."""

import torch
import triton
import triton.language as tl

from attnbench.machine.device import interpreted

# Triton's interpreter multiplies the bits of bfloat16 as integers.
WIDEN = tl.constexpr(interpreted())


def float32_product() -> str:
    """PRECISION of float32's products, as torch's own have it: three of TF32, which keep float32's digits, or, where
    torch may use TF32, one."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def product_precision(dtype: torch.dtype) -> str:
    """PRECISION of `product` in a kernel whose inputs have this dtype. What is float32 where they have fewer digits is
    multiplied to TF32's, cut off; of float32 inputs TF32's factors are rounded."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if float32_product() == "tf32x3" else "rounded tf32"


@triton.jit
def _nearest(x):
    """Round float32 to TF32."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(left, right, PRECISION: tl.constexpr, sum=None):
    """left @ right, plus `sum`, in float32; both have one dtype. PRECISION is what becomes of float32: "tf32x3",
    "rounded tf32" or "tf32"."""
    if WIDEN:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), sum, input_precision="ieee")
    elif PRECISION == "rounded tf32":
        # Tensor cores cut off the bits that TF32 lacks. Then all factors are too small, which no sum averages out: the
        # gradients of mLSTM, differences at a norm, are off by 1.2e-2 of themselves, with rounded factors by 8e-4.
        result = tl.dot(_nearest(left), _nearest(right), sum, input_precision="tf32")
    else:
        result = tl.dot(left, right, sum, input_precision=PRECISION)
    return result


@triton.jit
def tall_product(left, right, PRECISION: tl.constexpr, sum=None):
    """`product`, where `left` may have 64 rows and more of fewer columns: then in blocks of 32 rows.

    By the rows alone Triton takes Hopper's instructions for a group of four warps, which it compiles wrongly for narrow
    tiles.
    """
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
