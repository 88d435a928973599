"""What is compared with what, at which shape."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Peer:
    """An implementation that ours is timed beside."""

    name: str
    """What tables call it."""
    kind: str
    """Which function builds it, see implementations.py; `ours` is a mixer of ours beside another of ours."""
    options: dict[str, Any] = field(default_factory=dict)
    """What that function takes besides the shape."""
    overrides: tuple[str, ...] = ()
    """Of the case's settings, for this one alone."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    """One table."""

    name: str
    device: str
    """The type of device that it is meant for: `cuda` or `cpu`."""
    overrides: tuple[str, ...]
    """Ours, as train.py's command line has it; the shape is the peers' too."""
    peers: tuple[Peer, ...]
    """Ours gets the feed-forward width that meets the parameters of the first that is there."""
    kind: str = "ours"
    options: dict[str, Any] = field(default_factory=dict)


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
        Case(
            name="flash-256",
            device="cuda",
            overrides=("attn=flash", *SMALL, "seq_len=256", "train.batch_size=128"),
            peers=(NANOGPT,),
        ),
        Case(
            name="flash-1024",
            device="cuda",
            overrides=("attn=flash", *SMALL, "seq_len=1024", "train.batch_size=128"),
            peers=(NANOGPT,),
        ),
        Case(
            name="flash-12x768",
            device="cuda",
            overrides=("attn=flash", *LARGE, "seq_len=2048", "train.batch_size=16"),
            peers=(NANOGPT,),
        ),
        Case(
            name="softmax-256",
            device="cuda",
            overrides=("attn=softmax", *SMALL, "seq_len=256", "train.batch_size=128"),
            peers=(NANOGPT_TEXTBOOK,),
        ),
        Case(
            name="linear-256",
            device="cuda",
            overrides=("attn=linear", *SMALL, "seq_len=256", "train.batch_size=128"),
            peers=(FLA_LINEAR,),
        ),
        Case(
            name="gated_deltanet-256",
            device="cuda",
            overrides=("attn=gated_deltanet", *SMALL, "seq_len=256", "train.batch_size=128"),
            peers=(FLA_GATED,),
        ),
        Case(
            name="gated_deltanet-16384",
            device="cuda",
            overrides=("attn=gated_deltanet", *LARGE, "seq_len=16384", "train.batch_size=2"),
            peers=(FLA_GATED, Peer(name="our flash", kind="ours", overrides=("attn=flash",))),
        ),
        Case(
            name="flash-cpu-plain",
            device="cpu",
            overrides=("attn=flash", "model=4m", "seq_len=256", "train.batch_size=8"),
            peers=(Peer(name="plain GPT", kind="plain_gpt"),),
        ),
        Case(
            name="flash-cpu-nanogpt",
            device="cpu",
            overrides=("attn=flash", "model=4m", "seq_len=256", "train.batch_size=8"),
            peers=(Peer(name="nanoGPT", kind="nanogpt", options={"compiled": False}),),
        ),
        *map(_operators, ((8, 256, 4, 64), (2, 2048, 4, 64), (32, 256, 4, 32))),
    )
}
