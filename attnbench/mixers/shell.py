"""Shell of attnbench's mixers: the parts around the mixing and their options.

    x -> projection to query, key, value -> short convolution (-> SiLU) -> norm of query and key -> rotary positions
      -> the mixing -> norm of each head -> gate -> projection to the model's width

`Shell` builds these parts. `RecurrentMixer` adds state, forward pass, definition and FLOPs of a memory of fixed size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import State, expanded, expansions, head_count
from attnbench.mixers.flops import Products
from attnbench.mixers.options import MixerOptions, options_of
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.common.recurrence import by_position
from attnbench.ops.delta.delta_rule import unit_length
from attnbench.ops.layers.rotary import rotate_both, rotate_packed
from attnbench.settings.options import option

MOST_BUILT = 2**26
"""Largest number of weights of a mixer that is built on the CPU to count its FLOPs: 256 MiB."""


class Shell(MixerOptions):
    """Parts around a mixing. `sizes` and `widths` give their channels, `add_parts` creates a mixer's own parts."""

    dim: int
    head_width: int
    num_heads: int | None = option(None, "null: model.dim / head_width")
    backend: str = option("auto", "")
    rotary_theta: float | None = option(None, "base of rotary positions on query and key; null: none")
    conv_size: int = option(0, "taps of a short convolution over query, key and value; 0: none")
    qk_norm: bool = option(False, "RMS norm of each head's query and key, with a learned gain")
    output_norm: bool = option(False, "RMS norm of each head's output, with a learned gain")
    output_gate: Gate = option(
        "none", "multiply the output by silu(gate(x)) or sigmoid(gate(x)): none | silu | sigmoid"
    )

    conv_on: ClassVar[list[str] | None] = None
    """Parts that the convolution acts on, see QueryKeyValue."""
    activation: ClassVar[bool] = False
    """True if SiLU follows projection and convolution."""
    unit_keys: ClassVar[bool] = False
    """True if `qk_norm` divides query and key by their length, after rotation, instead of an RMS norm before it."""
    norm_eps: ClassVar[float] = 1e-6

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.check_options()
        self.options = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        self.backend = self.known_backend(self.backend)
        self.heads, self.key_width, self.value_width = self.sizes()
        activation = self.activates({"conv_size": self.conv_size})
        convolution = {"conv_size": self.conv_size, "conv_on": self.conv_on}
        self.query_key_value = QueryKeyValue(self.dim, *self.widths(), activation=activation, **convolution)
        is_learned = self.qk_norm and not self.unit_keys
        self.query_norm, self.key_norm = (head_norm(self.key_width, is_learned) for _ in range(2))
        self.positions = RotaryPositions(self.key_width, self.rotary_theta)
        self.norm = head_norm(self.value_width, self.output_norm, self.norm_eps)
        width = self.heads * self.value_width
        self.output = GatedOutput(self.dim, width, gate=self.output_gate, gate_rank=self.rank_of_gate())
        self.add_parts()
        self._decide_auto()

    def sizes(self) -> tuple[int, int, int]:
        """Return heads, key channels and value channels a head."""
        return head_count(self.num_heads, self.dim, self.head_width), self.head_width, self.head_width

    def widths(self) -> tuple[int, int, int]:
        """Return the channels of query, key and value over all heads."""
        keys = self.heads * self.key_width
        return keys, keys, self.heads * self.value_width

    def rank_of_gate(self) -> int | None:
        """Return the rank of the output gate's map; None: full rank."""
        return None

    def add_parts(self) -> None: ...

    def move_last(self, *names: str) -> None:
        """Move submodules behind all others: the order of the parameters decides the last bits of the gradient norm."""
        for name in names:
            self._modules[name] = self._modules.pop(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._decide_auto()
        return self

    def _decide_auto(self) -> None:
        weight = self.output.projection.weight
        precision = str(weight.dtype).removeprefix("torch.")
        if self.options["backend"] == "auto" and weight.device.type == "cuda" and precision in ("float32", "bfloat16"):
            self.backend = self.choose_backend(self.options, device_type="cuda", precision=precision)

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return cls.activation

    def split_heads(
        self, x_BTD: Tensor | Sequence[Tensor], history_BWC: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (B, T, H, channels), before norms and positions."""
        query, key, value = self.query_key_value(x_BTD, history_BWC)
        (query, key), (value,) = by_heads((query, key), self.key_width), by_heads((value,), self.value_width)
        return query, key, value

    def in_pairs(self, x_BTHK: Tensor) -> Tensor:
        """Average x over each two channels that rotary positions turn together: with different decays scores would
        depend on absolute positions."""
        if self.positions.theta is None:
            return x_BTHK
        return x_BTHK.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, dim=-1)


class RecurrentState(NamedTuple):
    """Memory of fixed size. A mixer with more memory has its own class, whose fields before `history_BWC` are the
    recurrence's memory; their letters give the shapes."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class RecurrentMixer(Shell):
    """Mixer whose memory has a fixed size.

    `operator` names its recurrence; `signals` computes its inputs beside query, key and value. A recurrence that
    attnbench/ops lacks is a method, `recurrence(memory, query, key, value, *signals)`: from the memory and the inputs
    of one position, (B, H, ...) each, to the new memory and y, (B, H, V).
    """

    value_expansion: float = option(1, "value channels a head, as a multiple of head_width", after="num_heads")

    operator: ClassVar[Any] = None
    """A `Recurrence`; None if the class has a method instead."""
    recurrence: ClassVar[Any]
    state_class: ClassVar[Any] = RecurrentState
    decays: ClassVar[bool] = False
    """True if the first signal is the log decay."""
    has_order: ClassVar[bool] = True
    needs_output_norm: ClassVar[bool] = True
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        table = None if cls.operator is None else cls.operator.backends
        if table is not None and "backends" not in vars(cls):
            cls.backends, cls.auto_rule = table.names, table.auto_rule
            cls.without_vmap = frozenset(table.names) - {"torch", "triton"}

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        if cls.operator is None or cls.operator.backends is None:
            return backend
        widths = None if options.get("head_width") is None else cls.kernel_widths(options)
        return cls.operator.backends.choose(options.get("backend", "auto"), widths, device_type, precision)

    @classmethod
    def kernel_widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        """Return the key and value channels a head that a kernel gets."""
        return options["head_width"], options["head_width"] * options.get("value_expansion", 1)

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        return expansions(options, dim=dim, head_width=head_width) if "value_expansion" in options_of(cls) else []

    def sizes(self) -> tuple[int, int, int]:
        value_width = expanded(self.head_width, self.value_expansion)
        return head_count(self.num_heads, self.dim, self.head_width), self.head_width, value_width

    @property
    def scale(self) -> float:
        return self.key_width**-0.5

    def signals(self, x_BTD: Tensor) -> tuple[Tensor | None, ...]:
        """Return the recurrence's further inputs, (B, T, ...) each, in float32 at least."""
        return ()

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        if not self.decays:
            return None
        log_decay = self.signals(x_BTD)[0]
        assert log_decay is not None
        return log_decay.expand(len(x_BTD), *log_decay.shape[1:])

    def normed_heads(
        self, x_BTD: Tensor | Sequence[Tensor], history_BWC: Tensor | None, angles: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value by heads: normed, rotated, the query scaled."""
        query, key, value = self.split_heads(x_BTD, history_BWC)
        query, key = rotate_both(self.query_norm(query), self.key_norm(key), angles)
        if self.unit_keys and self.qk_norm:
            return unit_length(query, self.scale), unit_length(key), value
        return query * self.scale, key, value

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Any, ...], Tensor]:
        """Return query, key, value and signals, and the gate's input, (B, T, D)."""
        heads = self.normed_heads(x_BTD, None if state is None else state.history_BWC, angles)
        return (*heads, *self.signals(x_BTD)), x_BTD

    def packed_inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[Any, ...]:
        """Return query, key and value side by side, (B, T, C), for kernels that norm and scale themselves, and the
        signals."""
        packed_BTC = self.query_key_value.packed(x_BTD, None if state is None else state.history_BWC)
        if angles is not None:
            packed_BTC = rotate_packed(packed_BTC, angles, sum(self.widths()[:2]) // self.key_width)
        return packed_BTC, *self.signals(x_BTD)

    @property
    def is_packed(self) -> bool:
        has_kernel = self.operator is not None and self.operator.packed is not None
        return has_kernel and (self.unit_keys or not self.qk_norm)

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        memory = None if state is None else self.memory_of(state)
        if self.backend == "triton" and self.is_packed:
            packed_BTC, *signals = self.packed_inputs(x_BTD, state, angles)
            mixed_BTHV, last = self.operator.packed(self, packed_BTC, *signals, memory)
            value_BTHV = packed_BTC[..., -self.heads * self.value_width :].unflatten(-1, (self.heads, -1))
            inputs, gate_BTD = (None, None, value_BTHV), x_BTD
        else:
            inputs, gate_BTD = self.inputs(x_BTD, state, angles)
            mixed_BTHV, last = self.mix(inputs, memory)
        if state is not None:
            state.position.add_(x_BTD.shape[1])
            if last is not None:
                for before, after in zip(_parts(memory), _parts(last), strict=True):
                    before.copy_(after)
        return self.finish(mixed_BTHV, inputs, gate_BTD), state

    def mix(self, inputs: tuple[Any, ...], memory: Any) -> tuple[Tensor, Any]:
        """Return y of every head, (B, T, H, V), and the last memory."""
        if self.operator is None:
            return self.define(inputs, self.new_memory(inputs[2]) if memory is None else memory)
        return self.operator.scan(*inputs, memory, self.backend)

    def define(self, inputs: tuple[Any, ...], memory: Any) -> tuple[Tensor, Any]:
        if self.operator is None:
            mixed_BTHV, memory = by_position(self.recurrence, memory, *inputs)
            return mixed_BTHV.to(inputs[2].dtype), memory
        return self.operator.define(*inputs, memory)

    def reference(self, x_BTD: Tensor) -> Tensor:
        inputs, gate_BTD = self.inputs(x_BTD, None, self.positions(x_BTD, 0))
        return self.finish(self.define(inputs, self.new_memory(inputs[2]))[0], inputs, gate_BTD)

    def finish(self, mixed_BTHV: Tensor, inputs: tuple[Any, ...], gate_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).to(inputs[2].dtype).flatten(2), gate_BTD)

    def memory_of(self, state: State) -> Any:
        """Return the recurrence's part of a state: a tensor, or a tuple of several."""
        parts = state[: state._fields.index("history_BWC")]
        return parts[0] if len(parts) == 1 else parts

    def letters(self) -> dict[str, int]:
        """Return the sizes of the letters in the names of the state's fields."""
        return {"H": self.heads, "K": self.key_width, "V": self.value_width}

    def new_memory(self, like: Tensor) -> Any:
        sizes = {"B": len(like), **self.letters()}
        names = self.state_class._fields[: self.state_class._fields.index("history_BWC")]
        shapes = [[sizes[letter] for letter in name.rpartition("_")[2]] for name in names]
        zeros = [torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device) for shape in shapes]
        return zeros[0] if len(zeros) == 1 else tuple(zeros)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> State:
        history_BWC = self.query_key_value.init_history(batch_size, dtype)
        position = self.positions.init_position(history_BWC.device)
        return self.state_class(*_parts(self.new_memory(history_BWC)), history_BWC=history_BWC, position=position)

    def mixing_flops(self, length: int) -> int:
        """Count the products of the definition; decays and sums count nothing."""
        return length * _flops_of_a_position(type(self), **{**self.options, "backend": "auto"})


@cache
def _flops_of_a_position(cls: type[RecurrentMixer], **options: Any) -> int:
    with torch.device("meta"):
        mixer = cls(**options)
    # A product on the meta device imports torch.compile, which takes seconds.
    if sum(parameter.numel() for parameter in mixer.parameters()) <= MOST_BUILT:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            mixer = cls(**options)
    with torch.device(next(mixer.parameters()).device), torch.no_grad():
        inputs, _ = mixer.inputs(torch.zeros(1, 1, mixer.dim), None, None)
    with Products() as products:
        mixer.define(inputs, mixer.new_memory(inputs[2]))
    return products.flops


def _parts(memory: Any) -> Sequence[Tensor]:
    return [memory] if isinstance(memory, Tensor) else memory
