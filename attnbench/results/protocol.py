"""Rules of verdicts, and their short name in every row: the rules that stood when a number was measured.

Whoever changes a rule that no number below says raises RULES_VERSION by hand. The name is no part of a `config_hash`:
one cell may be judged by several rules, and none of them changes its numbers.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnbench.results.identity import config_hash
from attnbench.results.metrics import Primary

RULES_VERSION = 1
"""Version of the rules that no other number here says: pairing by seed, failed seeds at chance, families."""

SIGNIFICANCE = 0.05
"""Error of a family of tests, and of a family of equivalence tests."""

TEST_NAMES = {
    "nats": "Student's paired t-test",
    "accuracy": "sign-flip permutation test",
    "share": "McNemar's exact test",
}
"""Test by kind of primary metric; `verdict.family.TESTS` has them under these names."""

PROTOCOL = "protocol"
"""Setting of every row of a mixer: the name of the rules that it was measured under."""


def rules() -> dict[str, Any]:
    """Describe the present rules that all evaluations have in common."""
    return {"version": RULES_VERSION, "significance": SIGNIFICANCE, "adjustment": "Holm", "tests": dict(TEST_NAMES)}


def protocol_of(primary: Primary | None, stop: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe what is said about an evaluation's scores and how: rules, primary metric with its margin, stop rule.

    Args:
        primary: None where every number of the evaluation is descriptive.
        stop: the rule by which its trainings end before their budget; None: they do not.
    """
    return {
        "rules": rules(),
        "primary": asdict(primary) if primary is not None else None,
        "stop": dict(stop) if stop is not None else None,
    }


def protocol_id(content: Mapping[str, Any]) -> str:
    """Return eight hex digits of a protocol, for the rows."""
    return config_hash(dict(content))
