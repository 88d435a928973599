"""Variants of one name that a sweep measured, told apart by what differs between them."""

from itertools import product
from typing import Any

import pytest
from made_rows import row

from attnbench.results.rows import ResultRow
from attnbench.verdict.axes import distinguish_variants


def measured(settings: dict[str, Any] | None = None, **identity: Any) -> ResultRow:
    return row("linear", settings=settings or {}, **identity)


def names(*rows: ResultRow) -> list[str]:
    return [it.identity.variant for it in distinguish_variants(rows)]


def options(**given: Any) -> dict[str, Any]:
    return {"mixer_options": {"feature_map": "elu", "num_heads": None, **given}}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([measured(config_hash=name) for name in "ab"], ["linear a", "linear b"]),
        ([measured(seq_len=length) for length in (64, 128)], ["linear T64", "linear T128"]),
        (
            [measured(options(conv_size=size), config_hash=f"h{size}") for size in (0, 4)],
            ["linear conv_size=0", "linear conv_size=4"],
        ),
        # Of lengths and options that both differ, both are named; of an option that makes no difference, nothing.
        (
            [measured(options(num_heads=heads), seq_len=length) for length, heads in product((64, 128), (None, 2))],
            [f"linear T{length} num_heads={heads}" for length, heads in product((64, 128), ("null", 2))],
        ),
        # A recipe is a name for many options.
        (
            [
                measured({**options(conv_size=0), "recipe": "bare"}),
                measured({**options(conv_size=4, output_gate="silu"), "recipe": "equipped"}),
                measured(options(conv_size=2)),
            ],
            ["linear bare", "linear equipped", "linear without a recipe"],
        ),
        (
            [measured({**options(conv_size=int(size)), "recipe": name}) for name, size in product("ab", "24")],
            [f"linear {name} conv_size={size}" for name, size in product("ab", "24")],
        ),
        ([measured(options(), backend=name) for name in ("torch", "triton")], ["linear torch", "linear triton"]),
        # Layers that differ have a list of options.
        (
            [measured({"mixer_options": [{"a": 1}, {"b": two}]}, config_hash=f"h{two}") for two in (2, 3)],
            ["linear h2", "linear h3"],
        ),
        # Seeds of one variant, and settings of one run, are no variants.
        ([measured(options(conv_size=size), seed=size) for size in (2, 4)], ["linear", "linear"]),
        ([measured({**options(), "length": length}) for length in (5, 10)], ["linear", "linear"]),
        # What no mixer was measured in is no variant of one.
        ([measured(mixer="", seq_len=length) for length in (64, 128)], ["linear", "linear"]),
    ],
)
def test_a_variant_is_named_by_what_differs(rows, told) -> None:
    assert names(*rows) == told


def test_one_name_holds_for_all_that_a_run_measured() -> None:
    """Also where an evaluation measured one of the runs alone, and under a hash of its own."""
    runs = [
        measured(options(conv_size=size), evaluation=evaluation, config_hash=f"{evaluation}{size}")
        for evaluation, size in (("recall", 0), ("recall", 4), ("copy", 4))
    ]
    assert names(*runs) == ["linear conv_size=0", "linear conv_size=4", "linear conv_size=4"]
