"""Rows that a program's numbers lie in, where programs share a tensor of rows by numbers and not by rows."""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

BLOCK = 1024
"""Numbers of the result that a program makes, wherever rows end: SwiGLU on an H200 is so within 5 % of the memory's
speed at every width, where blocks of whole rows lose up to a third on what sticks out."""


@triton.jit
def block_in_rows(width, BLOCK: tl.constexpr):
    """Return the first row, the numbers of the block counted from that row's start, and how many rows on each lies."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = first // width
    # From the start of a row, so that all but one division is of small numbers.
    index = (first - row * width).to(tl.int32) + tl.arange(0, BLOCK)
    return row, index, index // width
