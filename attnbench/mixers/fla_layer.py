"""Any layer of flash-linear-attention as it is, on a GPU: attn=fla attn.layer=GatedDeltaProduct."""

from importlib import import_module, metadata, util
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnbench.mixers.adapter import Adapter, layer_options
from attnbench.ops.common.fla import refuse_miscompiled_gates
from attnbench.settings.errors import UserError, did_you_mean

INSTALL = "pip install 'flash-linear-attention>=0.6,<0.7'"


class FlaLayer(Adapter):
    """A layer of fla.layers with its own projections, convolution, norm and gate; recipes do not reach it. It only
    trains and scores: attnbench does not call its caches. The library's version is part of a result's identity.

    Args:
        layer: name of the class in fla.layers.
        options: of its constructor, checked against its signature. The model gives hidden_size, head_dim, num_heads and
            layer_idx to a signature that names them, unless the options do.
    """

    backends: ClassVar[tuple[str, ...]] = ("fla",)
    auto_rule: ClassVar[str] = "there is no other"
    trains_only: ClassVar[frozenset[str]] = frozenset({"fla"})
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        layer_index: int = 0,
        layer: str,
        options: dict[str, Any] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.name, self.backend = layer, self.known_backend(backend)
        self.layer_class = _layer_class(layer)
        sizes = {"hidden_size": dim, "head_dim": head_width, "num_heads": max(1, dim // head_width)}
        self.options = layer_options(self.layer_class, options, {**sizes, "layer_idx": layer_index})
        self.adopt(dim)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        words = f"attn=fla attn.layer={options.get('layer')}"
        if device_type != "cuda":
            raise UserError(f"{words}: needs CUDA and flash-linear-attention ({INSTALL}), not device={device_type}")
        if util.find_spec("fla") is None:
            raise UserError(f"{words}: flash-linear-attention is not installed; run: {INSTALL}")
        capability, otherwise = torch.cuda.get_device_capability(), "take a mixer of attnbench's own with backend=torch"
        refuse_miscompiled_gates(words, capability, metadata.version("triton"), otherwise)
        return backend

    @property
    def words(self) -> str:
        return f"attn.layer={self.name}"

    def construct(self) -> nn.Module:
        return self.layer_class(**self.options)

    def mixing_flops(self, length: int) -> None:
        """Torch dispatches none of its kernels."""

    def mix(self, x_BTD: Tensor) -> Tensor:
        return self.inner(x_BTD)[0].to(x_BTD.dtype)


def _layer_class(name: str) -> type[nn.Module]:
    layers = import_module("fla.layers")
    known = sorted(getattr(layers, "__all__", ()))
    cls = getattr(layers, name, None)
    if name not in known or not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"attn.layer={name}: unknown{did_you_mean(name, known)}; fla.layers has {', '.join(known)}")
    return cls
