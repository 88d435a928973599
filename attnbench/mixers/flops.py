"""Operations of a mixer's definition, counted as torch dispatches them, for `mixing_flops` and its check."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attnbench.mixers.base import Mixer
from attnbench.mixers.layers import ShortConvolution

ELEMENTWISE = {"add": 1, "sub": 1, "rsub": 1, "mul": 1, "div": 1, "lerp": 3, "addcmul": 2, "addcdiv": 2}
"""Operations for each element of the result. Functions of one number, as exponentials, count nothing."""

COMPLEX_PRODUCT = 6

SUMS = ("sum", "mean", "cumsum", "cumprod", "prod")
"""Reductions that count one operation for each element of the operand."""

PRODUCTS_WITH_A_VECTOR = {"mv": 0, "dot": 0, "vdot": 0, "addmv": 1}
"""Products that torch has no formula for: two operations for each element of the operand with this index."""

FFT_OPERATIONS = 5
"""A complex Fourier transform of N numbers (after padding) counts FFT_OPERATIONS · N · log2 N, a real one half of
that."""

SHARED = ("attnbench.mixers.layers", "attnbench.mixers.around", "torch.nn.")
"""Starts of the names of modules whose layers count their products alone."""


class UncountableError(Exception): ...


class Products(TorchDispatchMode):
    """Sum of torch's formulas, without FlopCounterMode, which imports torch.compile."""

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True imports torch.compile.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        self.flops += formula(*args, **(kwargs or {}), out_val=out) if formula is not None else 0
        return out


class OperationCounter(TorchDispatchMode):
    """Add up, while entered, the operations of products, by torch's formulas, and of single elements.

    Args:
        length: positions, a prime that divides no other size. A tensor whose size it divides twice holds all pairs of
            positions; only the causal ones are counted.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.total = 0.0
        self.shared_depth = 0
        """Depth in modules that count their products alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operations = self._operations(func, args, kwargs or {}, out)
        if operations and any(self._is_of_pairs(x) for x in (*args, out) if isinstance(x, Tensor)):
            operations *= (self.length + 1) / (2 * self.length)
        self.total += operations
        return out

    def _is_of_pairs(self, x: Tensor) -> bool:
        return x.numel() > 0 and x.numel() % self.length**2 == 0

    def _operations(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        packet, name = func.overloadpacket, func.overloadpacket.__name__.rstrip("_")
        if packet in flop_registry:
            products = flop_registry[packet](*args, **kwargs, out_val=out)
            # An outer product has no sums.
            return products / 2 if name in ("mm", "bmm") and args[0].shape[-1] == 1 else products
        if name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
            # The real side of a transform has all N numbers.
            largest = max(args[0], out, key=Tensor.numel)
            size = math.prod(largest.shape[dim] for dim in args[1])
            share = FFT_OPERATIONS if name == "_fft_c2c" else FFT_OPERATIONS / 2
            return share * largest.numel() * math.log2(size)
        if func.namespace not in ("aten", "prim", "prims"):
            raise UncountableError(f"{func.namespace}::{name}")
        if name in PRODUCTS_WITH_A_VECTOR:
            return 2 * args[PRODUCTS_WITH_A_VECTOR[name]].numel()
        is_number = isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())
        if self.shared_depth or not is_number:
            return 0
        each = 1 if name in SUMS else ELEMENTWISE.get(name, 0)
        if out.is_complex():
            # A complex product is four real products and two sums.
            each *= COMPLEX_PRODUCT if name in ("mul", "div") else 2
        return each * (args[0] if name in SUMS else out).numel()


def counted_mixing(mixer: Mixer, length: int, dim: int) -> float:
    """Count operations of `mixer.reference` on one sequence, without those that a model counts itself: each matrix once
    a position, and elementwise work of norms and gates. Raise UncountableError for an operator without a formula."""
    weight = next(mixer.parameters())
    x_BTD = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0)).to(weight)
    matrices = sum(
        # The taps of a short convolution are not counted, so they are not subtracted.
        parameter.numel() * (parameter.dim() > 1)
        for module in mixer.modules()
        if not isinstance(module, ShortConvolution)
        for parameter in module.parameters(recurse=False)
    )
    counter = OperationCounter(length)
    # torch's fused attention on a CPU has no formula.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _shared_parts(mixer, counter), counter:
        mixer.reference(x_BTD)
    return counter.total - 2 * matrices * length


@contextmanager
def _shared_parts(mixer: Mixer, counter: OperationCounter) -> Iterator[None]:

    def enter(module: nn.Module, inputs: Any) -> None:
        counter.shared_depth += 1

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        counter.shared_depth -= 1

    hooks = []
    for module in mixer.modules():
        if type(module).__module__.startswith(SHARED):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
