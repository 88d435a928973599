"""Seeds booked by published tables, in docs/results/SEEDS: `first,last,plan` per line, or several plans of one table
separated by spaces."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_YAML_BYTES, read_bounded, whole_number


class Block(NamedTuple):
    """Seeds that only the plans of one table may score."""

    first: int
    last: int
    plans: tuple[str, ...]

    @property
    def named(self) -> str:
        return " and ".join(self.plans)


def read_blocks(path: Path) -> list[Block]:
    """Read the blocks of a file, none without it."""
    if not path.exists():
        return []
    blocks: list[Block] = []
    for number, line in enumerate(read_bounded(path, MAX_YAML_BYTES).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            first, last, plans = (part.strip() for part in line.split(","))
            block = Block(whole_number(first), whole_number(last), tuple(plans.split()))
        except ValueError:
            raise UserError(f"{path}:{number}: {line!r} is no block; a line is FIRST,LAST,PLAN") from None
        if not 0 <= block.first <= block.last or not block.plans:
            raise UserError(f"{path}:{number}: {line!r} is no block; the first seed is at most the last")
        other = next((it for it in blocks if it.first <= block.last and block.first <= it.last), None)
        if other is not None:
            raise UserError(f"{path}:{number}: {line!r} overlaps {other.first} to {other.last}, of {other.named}")
        blocks.append(block)
    return blocks


def check_blocks(plan: str, seeds: Sequence[int], blocks: Sequence[Block]) -> None:
    for block in blocks:
        taken = [seed for seed in seeds if block.first <= seed <= block.last and plan not in block.plans]
        if taken:
            raise UserError(
                f"plan.seeds: {taken[0]} is booked in docs/results/SEEDS, {block.first} to {block.last} for plan="
                f"{block.named}; take seeds, and these + 50 for the control, that no other plan has booked"
            )


def outside_blocks(plan: str, seeds: Sequence[int], blocks: Sequence[Block]) -> list[int]:
    """Return the seeds outside of a plan's blocks; none for a plan without blocks."""
    own = [block for block in blocks if plan in block.plans]
    return [seed for seed in seeds if own and not any(block.first <= seed <= block.last for block in own)]
