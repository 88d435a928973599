"""Backends of an operator: which there are, which heads our kernels take, and what `auto` is.

One table per operator. The mixers' settings and constructors, the yamls' comments and `attnbench doctor` read it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from attnbench.machine.device import require_triton
from attnbench.ops.common.fla import require_fla, require_gated_fla
from attnbench.settings.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Torch, our Triton kernels, and flash-linear-attention. `auto` is triton on CUDA for the heads that it takes, and
    otherwise torch."""

    takes: Callable[[int, float, str], bool]
    """Tell from key channels, value channels and precision if our kernels take a head."""
    heads: str
    """These heads in words."""
    has_gates: bool = True
    """True where the library's kernel has a decay, which some versions of Triton compile wrongly."""
    names: tuple[str, ...] = ("torch", "triton", "fla")

    @property
    def auto_rule(self) -> str:
        """Rule of `auto` in words."""
        return f"triton on CUDA for heads of {self.heads}, otherwise torch"

    def choose(self, backend: str, widths: tuple[int, float] | None, device_type: str, precision: str) -> str:
        """Resolve `auto`, and check that a named backend can run.

        Args:
            widths: key and value channels a head; None where the model, which gives them, is not known yet.

        Raises:
            UserError: triton without CUDA or for heads that it does not take; fla without CUDA, the library, or a
                Triton that compiles its gated kernels correctly.
        """
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
        return backend
