"""Checks that flash-linear-attention can run and is compiled correctly on this machine."""

from importlib import metadata, util

import torch

from attnbench.settings.errors import UserError


def require_fla(setting: str, device_type: str) -> None:
    """Raise a UserError that names `setting` unless the library is installed and the device is CUDA."""
    if device_type != "cuda":
        raise UserError(f"{setting}: flash-linear-attention needs CUDA, not device={device_type}; use backend=torch")
    if util.find_spec("fla") is None:
        raise UserError(f"{setting}: not installed; run: pip install 'flash-linear-attention>=0.6,<0.7'")


def refuse_miscompiled_gates(
    setting: str, capability: tuple[int, int], triton_version: str, otherwise: str = "use backend=torch"
) -> None:
    """Raise a UserError if Triton miscompiles the library's gated kernels: 3.4.0 to 3.7.0 on Hopper (capability 9). The
    library itself raises only in the first backward pass. `otherwise` is the remedy without another Triton version."""
    release = tuple(int(part) for part in triton_version.split("+")[0].split(".")[:3] if part.isdigit())
    if capability[0] == 9 and (3, 4, 0) <= release < (3, 7, 1):
        raise UserError(
            f"{setting}: triton {triton_version} miscompiles flash-linear-attention's gated kernels on Hopper; "
            f"install triton>=3.7.1 or {otherwise}"
        )


def require_gated_fla(setting: str, device_type: str) -> None:
    require_fla(setting, device_type)
    refuse_miscompiled_gates(setting, torch.cuda.get_device_capability(), metadata.version("triton"))
