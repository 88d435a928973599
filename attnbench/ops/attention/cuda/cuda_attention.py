"""FlashAttention's forward pass in CUDA C++, written for reading: flash_attention.cu, built on first use."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbench.settings.errors import UserError

STEPS = {"cuda_mma": 1, "cuda_ldmatrix": 2, "cuda_async": 3, "cuda_stages": 4}
"""Steps of the kernel by name, described in the source."""

WIDTHS = (64, 128)
SOURCE = Path(__file__).parent / "flash_attention.cu"


def load_cuda_attention(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return one of STEPS, a function of query, key and value (B, H, N, D) in float16 or bfloat16, D one of WIDTHS,
    without causal mask and backward pass. Raises UserError if nvcc is missing or the build fails."""
    kernel, step = _library(), STEPS[name]
    if isinstance(kernel, UserError):
        # A raised exception keeps its frames, so each caller gets a new one.
        raise UserError(str(kernel))

    def attend(query_BHNK: Tensor, key_BHNK: Tensor, value_BHNK: Tensor) -> Tensor:
        inputs = [x.contiguous() for x in (query_BHNK, key_BHNK, value_BHNK)]
        if any(x.shape != query_BHNK.shape or x.dtype != query_BHNK.dtype for x in inputs):
            raise ValueError("query, key and value must have one shape and dtype")
        if query_BHNK.dtype not in (torch.float16, torch.bfloat16) or query_BHNK.device.type != "cuda":
            raise TypeError(f"{query_BHNK.dtype} on {query_BHNK.device}: float16 and bfloat16 on CUDA are what it has")
        B, H, N, K = query_BHNK.shape
        output_BHNK = torch.empty_like(inputs[0])
        with torch.cuda.device_of(query_BHNK):
            stream = torch.cuda.current_stream().cuda_stream
            addresses = [x.data_ptr() for x in (*inputs, output_BHNK)]
            error = kernel(step, *addresses, B * H, N, K, query_BHNK.dtype == torch.bfloat16, stream)
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")
        return output_BHNK

    return attend


@functools.cache
def _library() -> Any:
    """Return the built function, called by ctypes so that no torch headers are compiled; or the build's UserError,
    because a cache keeps no exceptions."""
    try:
        return _build()
    except UserError as error:
        return error


def _build() -> Any:
    # Importing it looks for a compiler.
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None or not (Path(home) / "bin" / "nvcc").exists():
        raise UserError("it is built by nvcc, which is not here; install CUDA and set CUDA_HOME to its folder")
    if not cpp_extension.is_ninja_available():
        raise UserError("it is built by ninja, which is not here; run: pip install ninja")
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    try:
        path = cpp_extension.load(
            "attnbench_flash_attention",
            [str(SOURCE)],
            extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{capability},code=sm_{capability}"],
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(f"it could not be built: {(str(error).strip().splitlines() or [''])[-1]}") from error
    function = ctypes.CDLL(str(path)).attnbench_flash_attention
    pointers, numbers = [ctypes.c_void_p] * 4, [ctypes.c_int] * 4
    function.argtypes = [ctypes.c_int, *pointers, *numbers, ctypes.c_void_p]
    function.restype = ctypes.c_char_p
    return function
