"""Any nn.Module that keeps the shape (B, T, D), named on the command line: attn=module attn.path=package:Class."""

from typing import Any, ClassVar

import torch
from torch import nn

from attnbench.mixers.adapter import WIDTH_NAMES, Adapter, layer_options
from attnbench.mixers.base import ReturnError
from attnbench.mixers.causality import seen_of_the_future
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve_path

CHECK_LENGTH = 24
"""Positions of the input that a new layer is tried on; before a training causality is checked at the trained length."""


class Module(Adapter):
    """A layer of the user's without any part of attnbench around it: a function of (B, T, D) alone.

    Args:
        path: package:Class, found on PYTHONPATH. A checkpoint with it is refused unless this command line, or a yaml of
            its --config-dir, names it.
        options: of its constructor, checked against its signature. The model gives its width, `head_width`, `layer` and
            `num_layers` to a signature that names them.
    """

    auto_rule: ClassVar[str] = "there is no other"
    trains_only: ClassVar[frozenset[str]] = frozenset({"torch"})
    without_vmap: ClassVar[frozenset[str]] = frozenset({"torch"})

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        layer: int,
        num_layers: int,
        path: str,
        options: dict[str, Any] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.path = path
        self.backend = self.known_backend(backend)
        self.layer_class = resolve_path(path, nn.Module)
        widths = dict.fromkeys(WIDTH_NAMES, dim)
        sizes = {**widths, "head_width": head_width, "layer": layer, "num_layers": num_layers}
        self.options = layer_options(self.layer_class, options, sizes)
        self.adopt(dim)

    @property
    def words(self) -> str:
        return f"attn.path={self.path}"

    def construct(self) -> nn.Module:
        return self.layer_class(**self.options)

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        super().init_weights(generator, num_branches)
        shape = (2, CHECK_LENGTH, self.dim)
        x_BTD = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        # A user's layer may raise anything.
        try:
            y_BTD = self.mix(x_BTD)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.words}: raises for an input {shape}: {self.told(error)}") from error
        if y_BTD.shape != x_BTD.shape:
            raise UserError(f"{self.words}: an input {shape} became {tuple(y_BTD.shape)}; a mixer keeps the shape")
        try:
            seen = seen_of_the_future(self, self.dim, CHECK_LENGTH)
        except ReturnError as error:
            raise UserError(f"{self.words}: {error}") from error
        if seen:
            raise UserError(f"{self.words}: {seen}, so that a model reads what it shall predict; it is not built")
