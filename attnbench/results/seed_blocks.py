"""Seeds booked by published tables, in docs/results/SEEDS: `first,last,plan` per line, or several plans of one table
separated by spaces."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_YAML_BYTES, read_bounded


class Block(NamedTuple):
    """Seeds that only the plans of one table may score."""

    seeds: range
    plans: tuple[str, ...]


def read_blocks(path: Path) -> list[Block]:
    """Read the blocks of a file, none without it."""
    lines = read_bounded(path, MAX_YAML_BYTES).splitlines() if path.exists() else []
    blocks = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            first, last, plans = line.split(",")
            blocks.append(Block(range(int(first), int(last) + 1), tuple(plans.split())))
    return blocks


def check_blocks(plan: str, seeds: Sequence[int], blocks: Sequence[Block]) -> None:
    for block in blocks:
        taken = [seed for seed in seeds if seed in block.seeds and plan not in block.plans]
        if taken:
            raise UserError(
                f"plan.seeds: {taken[0]} is booked in docs/results/SEEDS, {block.seeds[0]} to {block.seeds[-1]} for "
                f"plan={' and '.join(block.plans)}; take seeds, and these + 50 for the control, that no other plan has "
                "booked"
            )


def outside_blocks(plan: str, seeds: Sequence[int], blocks: Sequence[Block]) -> list[int]:
    """Return the seeds outside of a plan's blocks; none for a plan without blocks."""
    own = [block.seeds for block in blocks if plan in block.plans]
    return [seed for seed in seeds if own and not any(seed in booked for booked in own)]
