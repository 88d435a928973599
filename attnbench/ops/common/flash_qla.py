"""Check that FlashQLA (github.com/QwenLM/FlashQLA), kernels of the gated delta rule, can run on this machine."""

from importlib import util

import torch

from attnbench.settings.errors import UserError

CARDS = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities of version 0.1.3."""
HEAD_WIDTH = 128
"""Key and value channels per head that it takes."""


def require_flash_qla(setting: str, device_type: str, precision: str, widths: tuple[int, float] | None) -> None:
    """Raise a UserError that names `setting` unless the library is installed and takes this device, precision and these
    heads (key and value channels; None if not known yet)."""
    if device_type != "cuda":
        raise UserError(f"{setting}: FlashQLA needs CUDA, not device={device_type}; use backend=torch")
    if not precision.startswith("bfloat16"):
        raise UserError(f"{setting}: FlashQLA computes in bfloat16, not {precision}; use backend=triton")
    if widths is not None and tuple(widths) != (HEAD_WIDTH, HEAD_WIDTH):
        raise UserError(
            f"{setting}: FlashQLA takes heads of {HEAD_WIDTH} key and value channels, not {widths[0]} and "
            f"{widths[1]:g}; use model.head_width={HEAD_WIDTH} or backend=triton"
        )
    if util.find_spec("flash_qla") is None:
        raise UserError(f"{setting}: not installed; run: pip install 'flash-qla>=0.1.3,<0.2'")
    capability = torch.cuda.get_device_capability()
    if capability not in CARDS:
        raise UserError(
            f"{setting}: FlashQLA has no kernels for compute capability {capability[0]}.{capability[1]}; "
            "use backend=triton"
        )
