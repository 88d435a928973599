"""Draw the figures of docs/concepts.md into docs/figures/: python tools/concept_figures.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from attnbench.cli.compose import compose
from attnbench.model.building import build_model
from attnbench.model.matching import match_mixer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
RATES = ROOT / "docs" / "results" / "mixers-h100" / "comparison.json"
SHOWN = ("softmax", "linear", "gated_deltanet", "mamba3")
VOCABULARY_SIZE = 284


def matching() -> alt.Chart:
    """Parameters of the parts of a model before and after matching."""
    rows = [row for name in ("softmax", "gated_deltanet", "mlstm") for row in _parameters(name)]
    bars = alt.Chart(alt.Data(values=rows)).mark_bar()
    return bars.encode(
        x=alt.X("millions:Q", title="million parameters, model=4m"),
        y=alt.Y("match:N", title=None, sort=["none", "params"], axis=alt.Axis(labelExpr="'match=' + datum.value")),
        color=alt.Color("part:N", title=None, sort=None),
        order=alt.Order("order:Q"),
        row=alt.Row("mixer:N", title=None, sort=list(SHOWN), header=alt.Header(labelAngle=0, labelAlign="left")),
    ).properties(width=420, height=46)


def _parameters(name: str) -> list[dict[str, Any]]:
    settings = compose([f"attn={name}", "model=4m"])
    rows = []
    for match in ("none", "params"):
        sizes = {"seq_len": settings.seq_len, "vocabulary_size": VOCABULARY_SIZE}
        matched = match_mixer(
            settings.mixer, settings.model, match=match, device_type="cpu", precision="float32", **sizes
        )
        model = build_model(matched.mixers, matched.model, vocabulary_size=VOCABULARY_SIZE, seed=0)
        whole = sum(parameter.numel() for parameter in model.parameters())
        mixers = sum(parameter.numel() for block in model.layers for parameter in block.mixer.parameters())
        forward = sum(parameter.numel() for block in model.layers for parameter in block.feed_forward.parameters())
        parts = {"mixers": mixers, "feed-forwards": forward, "embedding, norms": whole - mixers - forward}
        for order, (part, count) in enumerate(parts.items()):
            rows.append({"mixer": name, "match": match, "part": part, "millions": count / 1e6, "order": order})
    return rows


def rate_search() -> alt.LayerChart:
    """Validation loss of language models at each learning rate of a published search."""
    rows = []
    for search in json.loads(RATES.read_text(encoding="utf-8"))["rates"]:
        if search["variant"] in SHOWN and search["evaluation"] == "training":
            for stage, scores in (("1: one epoch", "after_an_epoch"), ("2: in full", "scores")):
                for rate, loss in search[scores].items():
                    chosen = stage.startswith("2") and float(rate) == search["chosen"]
                    point = {"rate": float(rate), "loss": loss, "stage": stage, "chosen": chosen}
                    rows.append({"variant": search["variant"], **point})
    ticks = alt.Axis(values=sorted({row["rate"] for row in rows}))
    dashes = alt.Scale(domain=["1: one epoch", "2: in full"], range=[[4, 3], [1, 0]])
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log", domain=[0.0008, 0.02]), axis=ticks),
        y=alt.Y("loss:Q", title="validation loss (nats a character)", scale=alt.Scale(zero=False)),
        color=alt.Color("variant:N", title=None, sort=list(SHOWN)),
    )
    legend = alt.Legend(symbolType="stroke", symbolStrokeColor="black", symbolFillColor="transparent")
    stages = alt.StrokeDash("stage:N", title="stage", scale=dashes, legend=legend)
    lines = base.mark_line(point=True).encode(strokeDash=stages)
    chosen = base.transform_filter("datum.chosen").mark_point(size=160, shape="circle", strokeWidth=2)
    return (lines + chosen).properties(width=420, height=240)


def verdicts() -> alt.LayerChart:
    """Intervals of a difference that lead to each verdict, at a margin of 1 %."""
    intervals = {
        "better, by more than matters": (-2.6, -1.3),
        "better": (-1.5, -0.4),
        "better, and equivalent": (-0.7, -0.2),
        "equivalent": (-0.4, 0.5),
        "undecided": (-0.8, 1.6),
        "worse": (0.3, 1.8),
    }
    rows = [{"verdict": name, "low": low, "high": high} for name, (low, high) in intervals.items()]
    height, title = 190, "difference in perplexity from the reference, in percent"
    scale = alt.Scale(domain=[-3, 3])
    band = alt.Chart(alt.Data(values=[{"from": -1, "to": 1}])).mark_rect(color="#dddddd")
    zero = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(color="#888888").encode(x="at:Q")
    marks = alt.Chart(alt.Data(values=rows)).mark_bar(height=6, color="#3b6fb6")
    return (
        band.encode(x=alt.X("from:Q", scale=scale, title=title), x2="to:Q")
        + zero
        + marks.encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=alt.Y("verdict:N", title=None, sort=None))
    ).properties(width=420, height=height)


FIGURES: dict[str, Callable[[], alt.TopLevelMixin]] = {
    "matching": matching,
    "rate_search": rate_search,
    "verdicts": verdicts,
}


def drawn(name: str) -> str:
    chart = FIGURES[name]().configure(background="white", font="sans-serif", axis=alt.AxisConfig(labelLimit=300))
    return vl_convert.vegalite_to_svg(chart.to_json())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in FIGURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name) + "\n", encoding="utf-8")
