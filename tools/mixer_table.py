"""The table of mixers in docs/mixers.md, built from conf/attn, conf/model/4m.yaml and the mixers' classes.

python tools/mixer_table.py puts the present one into the page.
"""

import re
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from small import MIXERS

from attnbench.cli.compose import compose
from attnbench.mixers.base import Mixer
from attnbench.model.building import build_model
from attnbench.model.matching import match_mixer
from attnbench.settings.registry import resolve

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from mixer_building import half_lives
from pages import ROOT, read

PAGE = "docs/mixers.md"
HEADERS = ("`attn=`", "paper", "parameters", "feed-forward", "MFLOPs a token", "state bytes", "half-lives")
VOCABULARY_SIZE = 284
NO_DECAY = "no decay"


def listed() -> list[str]:
    """Name the mixers of the page's table. One without a line there is an addition, which no other file need know."""
    return [name for name in MIXERS if f"\n| {name} |" in read(PAGE)]


@cache
def mixer_table(*names: str) -> str:
    """Return a line for each of these yamls of conf/attn."""
    lines = [[name, *cells(name)] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADERS, ["---"] * len(HEADERS), *lines))


def cells(name: str) -> list[str]:
    """Return the columns behind the mixer's name."""
    settings = compose([f"attn={name}", "model=4m"])
    sizes: dict[str, Any] = {"seq_len": settings.seq_len, "vocabulary_size": VOCABULARY_SIZE}
    plain, matched = (
        match_mixer(settings.mixer, settings.model, match=match, device_type="cpu", precision="float32", **sizes)
        for match in ("none", "params")
    )
    model = build_model(plain.mixers, plain.model, vocabulary_size=VOCABULARY_SIZE, seed=0)
    mixers: list[Mixer] = [block.mixer for block in model.layers]
    lives = [layer for mixer in mixers if (layer := half_lives(mixer, settings.model.dim)) is not None]
    grows = " and growing" if any(mixer.state_grows for mixer in mixers) else ""
    state_bytes = "none" if plain.state_bytes is None else f"{plain.state_bytes:,}{grows}"
    return [
        _paper(resolve(settings.mixer.target, Mixer)),
        f"{plain.parameters:,}",
        str(matched.model.feed_forward_width),
        f"{plain.flops_per_token / 1e6:.2f}",
        state_bytes,
        range_of(torch.cat(lives)) if lives else NO_DECAY,
    ]


def _paper(cls: type[Mixer]) -> str:
    """Return the first paper that the class's docstring names, under the name that it begins with."""
    text = " ".join((cls.__doc__ or "").split())
    named = re.search(r"arXiv (\d{4}\.\d{5})", text)
    return f"[{re.split(' [(]|, ', text)[0]}](https://arxiv.org/abs/{named[1]})" if named else ""


def range_of(lives: torch.Tensor) -> str:
    ends = dict.fromkeys(f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in (lives.min(), lives.max()))
    return " to ".join(ends)


def page() -> str:
    """Return the page with the present table in the place of its own."""
    before, _, rest = read(PAGE).partition(f"| {HEADERS[0]} |")
    old = list(takewhile(lambda line: line.startswith("|"), f"|{rest}".splitlines()))
    return before + mixer_table(*MIXERS) + "\n" + "".join(f"{line}\n" for line in f"|{rest}".splitlines()[len(old) :])


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
