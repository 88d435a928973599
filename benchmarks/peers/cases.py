"""Cases: implementations that are compared with each other, and their shapes."""

from dataclasses import dataclass, field
from typing import Any

OURS = "attnbench"
"""Variant of our rows."""

ABSENT = "absent"
"""Status of a peer that is not on this machine; every other is one of a result row."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Peer:
    """An implementation that ours is timed beside, or ours."""

    name: str
    """Name in tables."""
    kind: str
    """Function that builds it, see steps.py; `ours` is a mixer of ours, beside another of ours too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of that function besides the shape."""
    overrides: tuple[str, ...] = ()
    """Changes of the case's settings, for this one alone."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    """One table."""

    name: str
    device: str
    """Type of the device that it is meant for: `cuda` or `cpu`."""
    overrides: tuple[str, ...]
    """Settings of train.py; the shape is the peers' too."""
    peers: tuple[Peer, ...]
    """Ours gets the feed-forward width that meets the parameters of the first that is there."""
    kind: str = "ours"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Peer:
        """Our side."""
        return Peer(name=OURS, kind=self.kind, options=self.options)


SMALL = ("model=4m", "data.vocabulary_size=1015")
LARGE = (
    *("model=4m", "model.name=12x768", "model.dim=768", "model.num_layers=12", "model.feed_forward_width=2048"),
    *("data.vocabulary_size=1015", "train.learning_rate=6e-4"),
)

NANOGPT = Peer(name="nanoGPT, compiled", kind="nanogpt", options={"compiled": True})
NANOGPT_TEXTBOOK = Peer(
    name="nanoGPT without flash, compiled", kind="nanogpt", options={"compiled": True, "flash": False}
)
# The feature map is ours; the library's own, with two more projections a head, is slower. It has no normaliser.
FLA_LINEAR = Peer(
    name="fla LinearAttentionForCausalLM", kind="fla", options={"model": "LinearAttention", "feature_map": "elu"}
)
FLA_GATED = Peer(
    name="fla GatedDeltaNetForCausalLM",
    kind="fla",
    options={"model": "GatedDeltaNet", "head_dim": 64, "expand_v": 1, "conv_size": 4, "use_gate": True},
)
FLA_KDA = Peer(name="fla KDAForCausalLM", kind="fla", options={"model": "KDA", "head_dim": 64})
FLA_GLA = Peer(name="fla GLAForCausalLM", kind="fla", options={"model": "GLA", "expand_k": 1})
# Without a feed-forward, as published: of twice as many layers.
FLA_MAMBA2 = Peer(
    name="fla Mamba2ForCausalLM",
    kind="fla",
    options={"model": "Mamba2", "head_dim": 64, "num_heads": 24, "num_hidden_layers": 24},
)


def _models(name: str, attn: str, model: tuple[str, ...], seq_len: int, batch_size: int, *peers: Peer) -> Case:
    shape = (f"seq_len={seq_len}", f"train.batch_size={batch_size}")
    device = "cpu" if "-cpu-" in name else "cuda"
    return Case(name=name, device=device, overrides=(f"attn={attn}", *model, *shape), peers=peers)


def _operators(shape_BTHK: tuple[int, int, int, int]) -> Case:
    batch_size, length, heads, width = shape_BTHK
    options = {"shape": list(shape_BTHK)}
    return Case(
        name=f"delta-rule-cpu-{batch_size}x{length}x{heads}x{width}",
        device="cpu",
        overrides=("attn=gated_deltanet", f"seq_len={length}", f"train.batch_size={batch_size}"),
        kind="chunked_delta_rule",
        options=options,
        peers=(Peer(name="fla naive chunks", kind="naive_delta_rule", options=options),),
    )


CASES = {
    case.name: case
    for case in (
        _models("flash-256", "flash", SMALL, 256, 128, NANOGPT),
        _models("flash-1024", "flash", SMALL, 1024, 128, NANOGPT),
        _models("flash-12x768", "flash", LARGE, 2048, 16, NANOGPT),
        _models("softmax-256", "softmax", SMALL, 256, 128, NANOGPT_TEXTBOOK),
        _models("linear-256", "linear", SMALL, 256, 128, FLA_LINEAR),
        _models("gated_deltanet-256", "gated_deltanet", SMALL, 256, 128, FLA_GATED),
        _models(
            *("gated_deltanet-16384", "gated_deltanet", LARGE, 16384, 2),
            *(FLA_GATED, Peer(name="our flash", kind="ours", overrides=("attn=flash",))),
        ),
        _models("gated_deltanet-12x768", "gated_deltanet", LARGE, 2048, 8, FLA_GATED),
        _models("kda-12x768", "kda", LARGE, 2048, 8, FLA_KDA),
        _models("gla-12x768", "gla", LARGE, 2048, 8, FLA_GLA),
        _models("mamba2-12x768", "mamba2", LARGE, 2048, 8, FLA_MAMBA2),
        _models("flash-cpu-plain", "flash", ("model=4m",), 256, 8, Peer(name="plain GPT", kind="plain_gpt")),
        _models(
            *("flash-cpu-nanogpt", "flash", ("model=4m",), 256, 8),
            Peer(name="nanoGPT", kind="nanogpt", options={"compiled": False}),
        ),
        *map(_operators, ((8, 256, 4, 64), (2, 2048, 4, 64), (32, 256, 4, 32))),
    )
}
