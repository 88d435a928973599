"""Layers from outside as mixers: built and filled by their own constructor, and without a state."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnbench.mixers.base import Mixer, State
from attnbench.mixers.flops import UncountableError, counted_mixing
from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError, line_beside, one_line

WIDTH_NAMES = ("dim", "d_model", "hidden_size", "embed_dim")
"""Names of a constructor's argument that is the model's width."""


class Adapter(Mixer):
    """A layer (B, T, D) -> (B, T, D) from outside, with its own initial values and without a state. It is its own
    definition."""

    fills_submodules: ClassVar[bool] = True
    defines_itself: ClassVar[bool] = True
    inner: nn.Module
    layer_class: type[nn.Module]

    @property
    @abstractmethod
    def words(self) -> str:
        """The setting that names the layer: "attn.path=package:Class"."""

    @abstractmethod
    def construct(self) -> nn.Module:
        """Return a new layer with initial weights."""

    def told(self, error: Exception) -> str:
        where = line_beside(error, self.layer_class.__module__)
        return f"{one_line(error)}{where and f', at {where}'}"

    def adopt(self, dim: int) -> None:
        """Build the layer, at the end of a constructor."""
        self.dim = dim
        with torch.random.fork_rng(devices=[]):
            # A user's constructor may raise any exception.
            try:
                self.inner = self.construct()
            except Exception as error:
                raise UserError(f"{self.words}: its constructor raises {self.told(error)}") from error
        marked = (name for name, x in self.inner.named_parameters() if getattr(x, "_no_weight_decay", False))
        # fla marks its parameters so. An instance attribute hides the class's set of names.
        self.no_weight_decay = frozenset(f"inner.{name}" for name in marked)  # pyright: ignore[reportAttributeAccessIssue]
        if next(self.inner.parameters(), None) is None:
            raise UserError(f"{self.words}: has no parameters, and a mixer is a layer that is trained")

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Copy parameters and buffers of a new layer, built with torch's generator seeded by this one."""
        fresh = self._fresh(generator.initial_seed())
        with torch.no_grad():
            present, new = ([*layer.parameters(), *layer.buffers()] for layer in (self.inner, fresh))
            for tensor, initial in zip(present, new, strict=True):
                tensor.copy_(initial)

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        if state is not None:
            raise UserError(self.stateless)
        return self.mix(x_BTD), None

    def mix(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.inner(x_BTD)
        if not isinstance(y_BTD, Tensor):
            raise UserError(f"{self.words}: returns a {type(y_BTD).__name__}, not one tensor; return the output alone")
        return y_BTD.to(x_BTD.dtype)

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self.mix(x_BTD)

    @property
    def stateless(self) -> str:
        return f"{self.words}: has no state to decode with"

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> State:
        raise UserError(self.stateless)

    def mixing_flops(self, length: int) -> int | None:
        """Count the layer's dispatched operations beyond one use of each matrix a position; of T × T forms the half.
        None: an operator that cannot be counted, or a layer that does not run on the meta device."""
        sizes = {size for x in (*self.parameters(), *self.buffers()) for size in x.shape}
        # OperationCounter needs a prime that divides no width. The count is extrapolated from the nearest two such
        # lengths; that of a short sequence is exact.
        primes = [n for n in range(length, 2, -1) if _is_prime(n) and all(size % n for size in sizes)][:2]
        near, far = primes if len(primes) == 2 else [length, length]
        try:
            of_near, of_far = (counted_mixing(self, number, self.dim) / number for number in (near, far))
        except UncountableError:
            return None
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            if next(self.parameters()).is_meta:
                # It may need numbers, or an operator without a meta form.
                return None
            raise UserError(
                f"{self.words}: raises for an input (1, {length}, {self.dim}): {self.told(error)}"
            ) from error
        growth = (of_near - of_far) / (near - far) if near > far else 0.0
        return round(length * (of_near + growth * (length - near)))

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            return self.construct()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast as any module; once meta buffers get memory, fill them from a new layer."""
        had_none = any(buffer.is_meta for buffer in self.inner.buffers())
        super()._apply(fn, recurse)
        if had_none and not any(buffer.is_meta for buffer in self.inner.buffers()):
            with torch.no_grad():
                for mine, other in zip(self.inner.buffers(), self._fresh(0).buffers(), strict=True):
                    mine.copy_(other)
        return self


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def layer_options(cls: type, options: Mapping[str, Any] | None, from_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's constructor arguments: its options, and the model's sizes that its signature names. Raise
    UserError for an unknown option, or one of another type."""
    named, options = inspect.signature(cls).parameters, dict(options or {})
    given = {name: value for name, value in from_model.items() if name in named and name not in options}
    has_width = "dim" not in from_model or any(name in named for name in WIDTH_NAMES)
    names = " or ".join(WIDTH_NAMES)
    hint = "" if has_width else f"; if it is the model's width, name it {names}, and attnbench gives it"
    check_options(cls, options, given=given, group="attn.options", hint=hint)
    return {**given, **options}
