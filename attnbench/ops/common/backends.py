"""Table of an operator's backends: names, supported head sizes and the rule of `auto`, for settings, constructors, the
yamls' comments and `attnbench doctor`."""

from collections.abc import Callable
from dataclasses import dataclass

from attnbench.machine.device import require_triton
from attnbench.ops.common.fla import require_fla, require_gated_fla
from attnbench.ops.common.flash_qla import require_flash_qla
from attnbench.settings.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Backends:
    """`auto` is triton on CUDA for the heads that our kernels support, otherwise torch."""

    takes: Callable[[int, float, str], bool]
    """Return whether our kernels support a head with these key channels, value channels and precision."""
    heads: str
    """The supported heads in words."""
    has_gates: bool = True
    """True if fla's kernel has a decay; some Triton versions miscompile these."""
    names: tuple[str, ...] = ("torch", "triton", "fla")

    @property
    def auto_rule(self) -> str:
        return f"triton on CUDA for heads of {self.heads}, otherwise torch"

    def choose(self, backend: str, widths: tuple[int, float] | None, device_type: str, precision: str) -> str:
        """Resolve `auto`, and raise UserError if a named backend cannot run on this device, for these heads, or with
        the installed libraries. `widths` are key and value channels per head; None if not known yet."""
        fits = widths is None or self.takes(*widths, precision)
        if backend == "auto":
            return "triton" if device_type == "cuda" and fits else "torch"
        if backend == "triton":
            require_triton("attn.backend=triton", device_type)
            if widths is not None and not fits:
                raise UserError(
                    f"attn.backend=triton: kernels take heads of {self.heads}, not {widths[0]} and {widths[1]:g} in "
                    f"{precision}; choose attn.backend=torch"
                )
        if backend == "fla":
            (require_gated_fla if self.has_gates else require_fla)("attn.backend=fla", device_type)
        if backend == "flash_qla":
            require_flash_qla("attn.backend=flash_qla", device_type, precision, widths)
        return backend
