"""Write the page of measurements by several GPUs: python tools/scaling_page.py FOLDER scaling.json ...

FOLDER gets scaling.json, the lines of all given files but those of failed parts, a figure and README.md. Without files
the page is written again from FOLDER/scaling.json.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnbench.report.blocks import Picture
from attnbench.report.charts.marks import Axis, Drawing
from attnbench.report.charts.style import to_svg
from attnbench.report.charts.vega import draw

Line = dict[str, Any]
FIGURE = "speed.svg"
GOALS = {2: 0.97, 4: 0.94, 8: 0.94}
"""Share of perfect scaling by number of GPUs, set before the first measurement."""


def of_part(lines: Sequence[Line], part: str) -> list[Line]:
    return [line for line in lines if line["part"] == part]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' --: |' * (len(heads) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def page(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the page's Markdown."""
    machine = of_part(lines, "machine")[0]
    speeds = of_part(lines, "speed")
    worst = min(speeds, key=lambda line: line["of_perfect"])
    yield f"# One training on {machine['size']} GPUs\n"
    yield (
        f"A training on {worst['gpus']} GPUs has {worst['of_perfect']:.3f} of the speed of perfect scaling or more; "
        f"the goal was {GOALS[worst['gpus']]}.\n"
    )
    yield (
        f"Made by `tools/scaling.py` on {machine['size']} x {machine['device']} with NVLink, torch {machine['torch']}, "
        f"at commit {machine['commit']}. 12 layers of 768 channels, heads of 64, 8 x 2,048 tokens a GPU, bfloat16; "
        "tokens per second of steps 200 to 400. scaling.json has all measurements.\n"
    )
    yield f"![Speed of a training against the number of GPUs]({FIGURE})\n"
    rows = [
        [it["mixer"], str(it["gpus"]), f"{it['tokens_per_second']:,.0f}", f"{it['of_perfect']:.3f}"]
        for it in sorted(speeds, key=lambda line: (line["mixer"], line["gpus"]))
    ]
    yield from table(["mixer", "GPUs", "token/s", "of perfect scaling"], rows)
    for it in of_part(lines, "apart"):
        values = " and ".join(f"{value:,.0f}" for value in it["tokens_per_second"])
        yield f"\n{it['mixer']} on each GPU alone, at the same time: {values} token/s."
    yield "\n## Where the time of a step goes\n"
    yield "Milliseconds of one step under the profiler. Kernels that run beside the reduction take longer.\n"
    rows = [
        [it["mixer"], str(it["gpus"]), *(f"{it['milliseconds'][name]:.2f}" for name in PROFILE)]
        for it in sorted(of_part(lines, "profile"), key=lambda line: (line["mixer"], line["gpus"]))
    ]
    yield from table(["mixer", "GPUs", *PROFILE.values()], rows)
    yield "\n## Other settings of NCCL\n"
    yield from table(
        ["setting", "mixer", "token/s"],
        [[f"`{it['given']}`", it["mixer"], f"{it['tokens_per_second']:,.0f}"] for it in of_part(lines, "variants")],
    )
    yield "\n## Losses beside one GPU\n"
    yield "Float32, 512 tokens a sequence, the same whole batch: the largest difference of a step's loss, in nats.\n"
    yield from table(
        ["mixer", "learning rate", "steps", "largest difference"],
        [
            [it["mixer"], f"{it['rate']:g}", str(it["steps"]), f"{it['largest_difference']:.1e}"]
            for it in of_part(lines, "losses")
        ],
    )
    for it in of_part(lines, "killed"):
        yield "\n## A process is killed\n"
        yield (
            f"The other process says so after {it['line_after_s']:.2f} s, and the command has ended after "
            f"{it['ended_after_s']:.2f} s with exit code {it['exit_code']}. The same command then resumes "
            f"{it['resumed']} and trains to the end."
        )
    for it in of_part(lines, "compare"):
        yield "\n## A comparison on all GPUs\n"
        yield (
            f"`attnbench compare` of 24 trainings of recall takes {it['one_s']:.0f} s on one GPU and {it['all_s']:.0f} "
            f"s on {machine['size']}, {it['times']:.2f} times the speed, including the start of the processes. The "
            f"largest difference of the {it['scores']} scores is {it['largest_difference']:g}."
        )


PROFILE = {
    "whole": "whole step",
    "idle": "idle",
    "others_in_sum": "other kernels",
    "reduction": "reduction",
    "reduction_overlapped": "of it beside other kernels",
}


def svg(lines: Sequence[Line]) -> str:
    speeds = of_part(lines, "speed")
    numbers = sorted({line["gpus"] for line in speeds})
    mixers = list(dict.fromkeys(line["mixer"] for line in speeds))
    points = [
        {"variant": it["mixer"], "line": it["mixer"], "x": it["gpus"], "value": it["gpus"] * it["of_perfect"]}
        for it in speeds
    ]
    title = "Speed of a training against the number of GPUs"
    said = "; ".join(f"{it['variant']} {it['value']:.2f} times on {it['x']}" for it in points)
    drawing = Drawing(
        description=f"{title}: {said}.",
        labels={mixer: mixer for mixer in mixers},
        x=Axis(
            title="GPUs", domain=(0.9, max(it["x"] for it in points) + 0.1), ticks=sorted({it["x"] for it in points})
        ),
        y=Axis(title="tokens per second, of one GPU's", domain=(0, 1.05 * numbers[-1])),
        points=points,
        lines=points,
        levels=[{"x": number, "value": number} for number in numbers],
    )
    shown = {"name": "speed", "title": title, "spec": draw(drawing, mixers), "missing": ""}
    legend = "Dashed upper line: perfect scaling"
    return to_svg(Picture(**shown, legend=legend, description=drawing.description), mixers)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    given = parser.parse_args(words)
    kept = given.folder / "scaling.json"
    lines = [line for path in given.files or [kept] for line in json.loads(path.read_text()) if "failed" not in line]
    given.folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(lines, indent=1) + "\n")
    (given.folder / FIGURE).write_text(svg(lines), encoding="utf-8")
    (given.folder / "README.md").write_text("\n".join(page(lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
