"""Does recall go by the bytes of a state? The rank correlation over the points of plan=recall_state, and their figure.

python tools/recall_state.py outputs/recall_state [--figure recall_state.svg]

Takes a comparison of outputs/, or a published folder of docs/results; a point is a variant, its mean over seeds. Prints
Markdown. The interval is a bootstrap's over points: it says how much the correlation rests on single ones.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from attnbench.report.blocks import Picture
from attnbench.report.charts.marks import Axis, Drawing, round_numbers
from attnbench.report.charts.style import to_svg
from attnbench.report.charts.vega import draw
from attnbench.report.inputs import read_inputs
from attnbench.results.numbers import reaches
from attnbench.settings.errors import UserError
from attnbench.verdict.seeds import Figure

PROBE = "ladder_recall"
GOAL, FEWEST = 0.8, 12
"""Least correlation, and the fewest points that it is asked of."""

PUBLISHED = {
    "DeltaNet": ((8_960, 0.793), (34_304, 0.963)),
    "GatedDeltaNet": ((17_152, 0.890), (67_072, 0.988)),
    "GatedLinearAttention": ((4_864, 0.532), (17_920, 0.771)),
    "Mamba2": ((16_384, 0.690), (32_768, 0.784)),
}
"""Bytes by the source's own formula, and mean accuracy of seven cells: arXiv 2402.18668, figure 2, as
conf/finding/mqar.yaml has it."""

ABOUT_PUBLISHED = (
    "Rings: published accuracies of another setting, at bytes by their formula (arXiv 2402.18668, figure 2)"
)


@dataclass(frozen=True, kw_only=True)
class Point:
    variant: str
    mixer: str
    num_bytes: float
    recalled: Figure

    @property
    def pairs(self) -> float:
        assert self.recalled.mean is not None
        return self.recalled.mean


def points_of(figures: Sequence[Figure]) -> list[Point]:
    """Pair each variant's pairs recalled with the bytes of its state; the fewest bytes first.

    Raises:
        UserError: a variant without one of them, or fewer than three variants.
    """
    of_probe = [it for it in figures if it.evaluation == PROBE]
    recalled = {it.variant: it for it in of_probe if it.metric == "pairs_recalled"}
    sizes = {it.variant: it.mean for it in of_probe if it.metric == "state_bytes"}
    lacking = [name for name, it in recalled.items() if it.mean is None or not sizes.get(name)]
    if lacking or len(recalled) < 3:
        reason = f"{', '.join(lacking)} without a score or a state" if lacking else "a correlation takes three variants"
        raise UserError(f"{len(recalled)} variants with {PROBE}: {reason}")
    found = [
        Point(variant=name, mixer=it.identity.mixer, num_bytes=sizes[name] or 0, recalled=it)
        for name, it in recalled.items()
    ]
    return sorted(found, key=lambda point: (point.num_bytes, point.pairs))


def correlation(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return Spearman's correlation, and the ends of its 95 % interval by the bootstrap over points."""
    points_2N = np.array(pairs, dtype=float).T
    # Of equal numbers there is no correlation.
    if any(len({*values}) == 1 for values in points_2N.tolist()):
        return math.nan, math.nan, math.nan
    # A resample of a few points may be a single one.
    if len(pairs) < FEWEST:
        return float(_spearman(*points_2N)), -1.0, 1.0
    how: Any = {"paired": True, "vectorized": True, "method": "percentile", "random_state": 0}
    ends = stats.bootstrap(points_2N, _spearman, **how).confidence_interval
    return float(_spearman(*points_2N)), float(ends.low), float(ends.high)


def _spearman(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    ranks = [stats.rankdata(values, axis=axis) for values in (x, y)]
    x, y = (values - values.mean(axis, keepdims=True) for values in ranks)
    return (x * y).sum(axis) / np.sqrt((x**2).sum(axis) * (y**2).sum(axis))


def page(points: Sequence[Point]) -> Iterator[str]:
    found, low, high = correlation([(point.num_bytes, point.pairs) for point in points])
    is_met = len(points) >= FEWEST and reaches(found, GOAL)
    lead = "Recall goes by the bytes of the state." if is_met else "**Recall does not go by the bytes of the state.**"
    goal = f"asked: {GOAL} or more over {FEWEST} points or more"
    yield f"{lead} Spearman's correlation is {found:.2f} [{low:.2f}, {high:.2f}] over {len(points)} points ({goal})."
    published = [point for of_mixer in PUBLISHED.values() for point in of_mixer]
    of_source = correlation(published)[0]
    yield f"\nOver the {len(published)} published points it is {of_source:.2f}. {ABOUT_PUBLISHED}."
    yield "\n| variant | mixer | bytes of state | pairs recalled | lowest to highest seed | seeds |"
    yield "| --- | --- | --: | --: | --: | --: |"
    for point in points:
        seeds = point.recalled.values.values()
        ends = f"{min(seeds):.1f} to {max(seeds):.1f}"
        shown = (point.variant, point.mixer, f"{point.num_bytes:,.0f}", f"{point.pairs:.1f}", ends, str(len(seeds)))
        yield f"| {' | '.join(shown)} |"


def svg(points: Sequence[Point], most: int) -> str:
    """Draw shares of the most pairs that were asked for, and the published accuracies as rings."""
    mixers = list(dict.fromkeys(point.mixer for point in points))
    data = [
        {"variant": point.mixer, "line": point.mixer, "x": point.num_bytes, "value": point.pairs / most}
        | {"low": min(point.recalled.values.values()) / most, "high": max(point.recalled.values.values()) / most}
        for point in points
    ]
    rings = [
        {"variant": mixer, "x": num_bytes, "value": accuracy}
        for mixer in mixers
        for num_bytes, accuracy in PUBLISHED.get(mixer, ())
    ]
    sizes = [datum["x"] for datum in (*data, *rings)]
    ends = min(sizes) / 1.25, max(sizes) * 1.25
    title = "Pairs recalled against bytes of state"
    drawing = Drawing(
        description=f"{title}: {'; '.join(f'{it.variant} {it.pairs:.1f} at {it.num_bytes:,.0f}' for it in points)}.",
        labels={mixer: mixer for mixer in mixers},
        x=Axis(title="bytes of state a sequence", domain=ends, is_logarithmic=True, ticks=round_numbers(*ends)),
        y=Axis(title=f"pairs recalled, as a share of {most}", domain=(0, 1)),
        points=data,
        lines=data,
        rings=rings,
    )
    legend = "Joined: one mixer at several widths; bars from the lowest to the highest seed"
    spec = draw(drawing, mixers)
    shown = {"name": "recall_state", "title": title, "spec": spec, "description": drawing.description}
    return to_svg(Picture(**shown, legend=legend, missing=ABOUT_PUBLISHED), mixers)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/recall_state or a folder of docs/results")
    parser.add_argument("--figure", type=Path, help="also draw this SVG")
    given = parser.parse_args(words)
    try:
        figures = read_inputs(given.folder).figures
        points = points_of(figures)
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    print("\n".join(page(points)))
    if given.figure is not None:
        most = max(it.settings.get("num_pairs", 0) for it in figures if it.evaluation == PROBE)
        given.figure.write_text(svg(points, most), encoding="utf-8")


if __name__ == "__main__":
    main()
