"""The interface of a sequence mixer, and the legend of the dimension letters.

    B batch    T positions (S where the source differs)    D model width    H heads    N chunks
    K key channels a head    V value channels a head    W taps of history    C other channels

Tensors carry their shape as a suffix (`query_BTHK`), with the layout (B, T, H, K) at every function boundary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnbench.settings.errors import UserError

State = Any
"""State between two calls: a NamedTuple of tensors."""


class Mixer(nn.Module, ABC):
    """Mix along the sequence: (B, T, D) in, (B, T, D) out; position t sees positions up to t alone.

    The training forward (no state) is a pure function of parameters and input: it writes no buffers and has no Python
    branch on data, so that it runs under functional_call, vmap, compile and CUDA-graph capture.

    The constructor is keyword-only and typed, without **kwargs: its signature is the schema of its yaml. The model
    gives `dim` and `head_width`, and `layer` and `num_layers` to a signature that names them.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch",)
    """Kernels that the `backend` setting can name, besides `auto`."""

    auto_rule: ClassVar[str] = "the first of its backends"
    """Rule of `auto` in a few words, for tables and messages."""

    constructor_takes: ClassVar[dict[str, str]] = {
        "backend": 'give it backend: str = "auto", and keep self.known_backend(backend), by which rows say what ran'
    }
    """Options of every mixer's constructor, and what to do with each."""

    trains_only: ClassVar[frozenset[str]] = frozenset()
    """Backends that cannot take a state."""

    without_vmap: ClassVar[frozenset[str]] = frozenset()
    """Backends whose kernel has no batching rule: stacked models cannot train through it."""

    no_weight_decay: ClassVar[frozenset[str]] = frozenset()
    """Names of this module's own parameters that take no weight decay."""

    same_function: ClassVar[str] = ""
    """`_target_` of the mixer whose function this class computes by another kernel, unless an option that only this one
    has is set. Comparisons of mixers count both as one. Never inherited."""

    state_grows: ClassVar[bool] = False
    """True if the state's size depends on `max_length`."""

    state_memory: ClassVar[tuple[str, ...]] = ()
    """Fields of a state of fixed size that match=state counts: the memory, without history and normaliser."""

    has_order: ClassVar[bool] = False
    """True if the recurrence itself tells positions apart, as a decay or the delta rule does."""

    needs_qk_norm: ClassVar[bool] = False
    """True if the recurrence can grow without bound unless query and key are normed."""

    needs_output_norm: ClassVar[bool] = False
    """True if the output has no bound, as that of a sum without a normaliser."""

    undone_by: ClassVar[dict[str, str]] = {}
    """Options that would make it another mixer, each with the reason. Recipes and probes leave them as in the yaml;
    reports warn if the user sets one."""

    paper_options: ClassVar[dict[str, Any]] = {}
    """Values of the paper that differ from the yaml's; reports show them."""

    fills_submodules: ClassVar[bool] = False
    """True if `init_weights` fills the submodules too."""

    defines_itself: ClassVar[bool] = False
    """True for a layer from outside, whose `reference` is the layer itself."""

    replaces_feed_forward: ClassVar[bool] = False
    """True if its block has no feed-forward."""

    @classmethod
    def known_backend(cls, backend: str) -> str:
        """Return a backend by name, the first for `auto`."""
        if backend != "auto" and backend not in cls.backends:
            raise UserError(f"attn.backend={backend}: {cls.__name__} has {', '.join(('auto', *cls.backends))}")
        return cls.backends[0] if backend == "auto" else backend

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        """Return True if SiLU follows the projection and convolution of query, key and value."""
        return False

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Resolve `auto`, once, before the model is built; raise UserError for a kernel that cannot run here.

        Args:
            options: the mixer's settings, and `head_width` if known.
            device_type: "cpu" or "cuda".
            precision: "float32", "tf32" or "bfloat16".
        """
        return cls.known_backend(options.get("backend", "auto"))

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Return the values of the setting that decides the size of `state_memory`, smallest first, as changes of
        `options`: [{"value_expansion": 1}, {"value_expansion": 2}]. Empty: match=state is refused."""
        return []

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Fill this module's own parameters from the generator alone: modules are filled in threads.

        Args:
            generator: a CPU generator seeded by the run's seed and this module's full name.
            num_branches: number of outputs added to the residual stream, by which they are scaled.
        """

    @abstractmethod
    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Mix T positions; with a state, those after the ones that it has seen. The state is updated in place."""

    @abstractmethod
    def reference(self, x_BTD: Tensor) -> Tensor:
        """Compute the training forward by the slow definition, in the precision of x and the weights."""

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> State:
        """Return an empty state for up to `max_length` positions. Caches have `dtype`, recurrent states are float32, a
        position is int64."""

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        """Return log a_t, by which the memory is multiplied before position t, (B, T, H) or (B, T, H, K); None: no
        decay."""
        return None

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one position. Captured in a CUDA graph, so it may not read from the device."""
        y_BTD, state = self.forward(x_BD[:, None], state)
        return y_BTD[:, 0], state

    @abstractmethod
    def mixing_flops(self, length: int) -> int | None:
        """Count the forward operations of the mixing per sequence, without projections: a multiply-add counts 2, a
        causal mixing only the pairs it needs. None: unknown."""


class ReturnError(UserError):
    """A mixer does not return (y, state) with y of the input's shape, or two calls differ."""


def checked_return(returned: Any, x: Tensor, method: str = "forward") -> tuple[Tensor, State]:
    """Return output and state of a call of `method`, or raise ReturnError. A tensor of two sequences could be unpacked
    too."""
    shape = tuple(x.shape)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"one {type(returned).__name__}"
        raise ReturnError(f"{method} returns {kind}; return (y, state), with y of the input's shape {shape}")
    y, state = returned
    if not isinstance(y, Tensor) or y.shape != x.shape:
        kind = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
        raise ReturnError(f"{method} returns y of {kind}; it must be a tensor of the input's shape {shape}")
    return y, state


def state_bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state)


def head_count(num_heads: int | None, dim: int, head_width: int) -> int:
    """Return `num_heads`, or by default the heads that fill the model's width."""
    if num_heads is not None:
        if num_heads < 1:
            raise UserError(f"attn.num_heads={num_heads}: must be at least 1")
        return num_heads
    if dim % head_width:
        possible = ", ".join(str(width) for width in range(1, dim + 1) if dim % width == 0)
        raise UserError(
            f"head_width={head_width}: must divide model.dim={dim}; set model.head_width, or attn.head_width where "
            f"that is given, to one of {possible}"
        )
    return dim // head_width


def expanded(head_width: int, value_expansion: float) -> int:
    width = round(head_width * value_expansion)
    if width < 1 or width != head_width * value_expansion:
        raise UserError(f"attn.value_expansion={value_expansion}: times head_width={head_width} must be a whole number")
    return width


def expansions(options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
    """Return `state_choices` of a mixer with `value_expansion`: value channels up to the model's width."""
    key_width = options.get("head_width", head_width)
    return [
        {"value_expansion": width // key_width if width % key_width == 0 else width / key_width}
        for width in range(1, dim + 1)
        # The constructor wants whole channels, which the rounded quotient can miss.
        if key_width * (width / key_width) == width
    ]
