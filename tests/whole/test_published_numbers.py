"""Numbers that the README and docs repeat from docs/results are those of the rows there."""

import re
from functools import cache
from statistics import fmean

from pages import ROOT, read

from attnbench.results.row_tables import read_csv, table_of
from attnbench.results.rows import ALL_SEEDS, ResultRow


@cache
def rows_of(page: str) -> list[ResultRow]:
    rows = read_csv(table_of(ROOT / "docs/results" / page))
    return [row for row in rows if row.identity.seed != ALL_SEEDS and row.measurement.value is not None]


def value(page: str, variant: str, metric: str, evaluation: str, **settings: object) -> float:
    found = [
        row.measurement.value
        for row in rows_of(page)
        if (row.identity.variant, row.measurement.metric, row.identity.evaluation) == (variant, metric, evaluation)
        and settings.items() <= row.measurement.settings.items()
    ]
    assert found, (page, variant, metric, settings)
    return fmean(found)


def table(text: str, head: str) -> list[list[str]]:
    """Cells of a table's lines, by the line that it begins with."""
    lines = re.findall(r"(?:^\|.*\n)+", text[text.index(head) :], re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_training_speeds_by_length_are_those_of_the_battery():
    names, *lines = table(read("docs/results/README.md"), "| characters |")
    for length, *cells in lines:
        size = int(length.replace(",", ""))
        for name, cell in zip(names[1:], cells, strict=True):
            if cell:
                at = {"sequence_length": size, "batch_size": 32_768 // size}
                speed = value("battery-h100", name, "tokens_per_second", "throughput", **at)
                assert cell == f"{speed / 1e6:.2f}", (name, length)


def test_prompts_decoding_and_states_are_those_of_all_mixers():
    _, *lines = table(read("docs/results/README.md"), "| variant | prompts")
    assert len(lines) == 21
    for name, prompts, one, many, state in lines:
        where = "mixers-h100", name
        speeds = [
            value(*where, f"{what}_tokens_per_second", "inference", batch_size=size)
            for what, size in (("prefill", 128), ("decode", 1), ("decode", 128))
        ]
        assert [prompts, one, many] == [f"{speeds[0] / 1e6:.1f}", *(f"{speed:,.0f}" for speed in speeds[1:])]
        assert state == f"{value(*where, 'state_bytes', 'inference'):,.0f}"


def test_why_flash_attention_is_fast_has_the_numbers_of_its_table():
    names, *lines = table(read("docs/operator_tables.md"), "| | textbook |")
    variants = {"textbook": "textbook", "compiled": "compiled", "SDPA's flash kernel": "sdpa_flash", "ours": "triton"}
    metrics = ("forward_milliseconds", "backward_milliseconds", "memory_before_backward_mib")
    for metric, (_, *cells) in zip(metrics, lines, strict=True):
        for name, cell in zip(names[1:], cells, strict=True):
            shape = {"head_width": 64, "sequence_length": 8192, "causal": True, "batch_size": 8, "num_heads": 1}
            measured = value("attention-h200", variants[name], metric, "attention", **shape)
            shown = float(cell.replace(",", ""))
            digits = len(cell.partition(".")[2])
            assert abs(shown - measured) <= 0.5 * 10.0**-digits + 1e-9, (metric, name)


def test_what_the_readme_says_is_not_equal_is_what_the_rows_say():
    told = " ".join(read("README.md").split())
    of = "mixers-h100"

    def flops(name: str) -> float:
        return value(of, name, "forward_flops_per_token", "training")

    for name in ("mamba2", "mamba3"):
        assert round(100 * (flops(name) / flops("softmax") - 1)) == 16
        assert (
            7
            < value(of, name, "state_bytes", "inference") / value(of, "gated_deltanet", "state_bytes", "inference")
            < 8
        )
    assert (
        "mamba2 and mamba3 take 16 % more FLOPs than softmax, and over seven times the state of gated_deltanet" in told
    )
    for page, model, words in ((of, "1m", "0.73 million parameters"), ("battery-h100", "4m", "models of 3.8 million")):
        sizes = {
            row.identity.parameters
            for row in rows_of(page)
            if (row.identity.variant, row.identity.model) == ("softmax", model)
        }
        (size,) = {size for size in sizes if size}
        assert words.split(" million")[0].split()[-1] == f"{size / 1e6:.2g}"
        assert words in told


def test_published_sizes_score_what_the_results_say():
    told = " ".join(read("docs/results/README.md").split())
    told = told[told.index("[published-h100](published-h100/README.md) is the comparison") :]
    best = {"sequence_length": 256, "checkpoint": "best", "split": "test", "context": "full"}
    for name, words in (
        ("gated_deltanet", "Gated DeltaNet, with {size} million parameters, comes to a perplexity of {score}"),
        ("softmax", "softmax, with {size}, to {score}"),
        ("linear", "linear attention, with nothing around it, to {score}"),
    ):
        rows = [row for row in rows_of("published-h100") if row.identity.variant == name]
        (size,) = {row.identity.parameters for row in rows if row.identity.evaluation == "training"}
        nats = value("published-h100", name, "perplexity", "perplexity", **best)
        assert words.format(size=f"{(size or 0) / 1e6:.1f}", score=f"{nats:.2f}") in told
        recall = value("published-h100", name, "accuracy", "recall", num_pairs=15)
        copied = value("published-h100", name, "symbol_accuracy", "copy", length=50, beyond_training=False)
        assert [recall > 0.98, copied > 0.98] == [name != "linear"] * 2
