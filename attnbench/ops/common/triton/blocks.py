"""Blocks of numbers that ignore where the rows of a tensor end."""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

BLOCK = 1024
"""Numbers of the result that a program computes. SwiGLU on an H200 runs within 5 % of the memory's speed at every
width; blocks of whole rows lose up to a third at some."""


@triton.jit
def block_in_rows(width, BLOCK: tl.constexpr):
    """Return the block's first row, its numbers counted from that row's start, and the row of each, counted
    likewise."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = first // width
    # From the start of a row, so that all but one division is of small numbers.
    index = (first - row * width).to(tl.int32) + tl.arange(0, BLOCK)
    return row, index, index // width
