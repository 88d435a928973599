"""Whether our Triton kernels can run: for a mixer that names them its backend, and for layers that all mixers share."""

import os
from importlib import util

import torch
from torch import Tensor

from attnbench.settings.errors import UserError


def require_triton(setting: str, device_type: str) -> None:
    """Raises UserError, with the way out, unless Triton is installed and can run kernels on such a device.

    On a CPU it can through its interpreter, which is for tests: TRITON_INTERPRET=1, set before the kernels are loaded.

    Args:
        setting: how the user named it, for the message, such as "attn.backend=triton".
        device_type: "cpu" or "cuda".
    """
    if device_type != "cuda" and not interpreted():
        raise UserError(
            f"{setting}: our Triton kernels need CUDA, not device={device_type}; choose another backend "
            "(TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests)"
        )
    if not has_triton():
        raise UserError(f"{setting}: Triton is not installed; run: pip install 'triton>=3.6,<3.8'")


def has_triton() -> bool:
    """Whether it is installed, as it is with every CUDA build of torch for Linux."""
    return util.find_spec("triton") is not None


def on_kernels(x: Tensor) -> bool:
    """Whether a layer that all mixers share takes its own kernel for such a tensor: on CUDA, float64 excepted.

    Every CUDA build of torch for Linux brings Triton.
    """
    return x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"
