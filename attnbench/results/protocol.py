"""Rules of verdicts, and their id in every row, as they were when it was measured.

Raise RULES_VERSION with a rule that no number below describes. The id is not part of `config_hash`.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnbench.results.identity import config_hash
from attnbench.results.metrics import Primary

RULES_VERSION = 1
"""Version of rules without a number here: pairing by seed, failed seeds at chance, families."""

SIGNIFICANCE = 0.05
"""Error of a family of tests and of equivalence tests."""

TEST_NAMES = {
    "nats": "Student's paired t-test",
    "accuracy": "sign-flip permutation test",
    "share": "McNemar's exact test",
    "level": "permutation test and Welch's of unpaired means, both",
}
"""Test by kind of primary metric; `verdict.family.TESTS` has them under these names. No metric is a share any more, but
the id of every protocol covers its test."""

PROTOCOL = "protocol"
"""Setting of rows: id of the protocol."""


def rules(kind: str | None = None) -> dict[str, Any]:
    """The test of levels came later, and only its own rules name it."""
    tests = {name: test for name, test in TEST_NAMES.items() if name != "level" or kind == "level"}
    return {"version": RULES_VERSION, "significance": SIGNIFICANCE, "adjustment": "Holm", "tests": tests}


def protocol_of(primary: Primary | None, stop: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe the rules of an evaluation: shared ones, primary metric with margin (None: every number is descriptive),
    and the rule by which trainings end early, if they do."""
    return {
        "rules": rules(primary.kind if primary is not None else None),
        "primary": asdict(primary) if primary is not None else None,
        "stop": dict(stop) if stop is not None else None,
    }


def protocol_id(content: Mapping[str, Any]) -> str:
    return config_hash(dict(content))
