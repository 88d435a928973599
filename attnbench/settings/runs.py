"""Settings of attnbench runs: which runs and cells are listed, compared or removed."""

from dataclasses import dataclass

from attnbench.settings.errors import UserError
from attnbench.settings.schema import setting

STATUSES = ("finished", "unfinished", "failed", "running", "damaged")
"""States of a folder: damaged is one whose results were altered after they were written, or cannot be read."""

PRUNED = ("unfinished", "failed", "checkpoints", "weights")
"""Kinds of what can be removed: folders without finished results, checkpoints that no command reads again, and weights
of language models, which attnbench evaluate and attnbench generate read."""


@dataclass(slots=True, kw_only=True)
class RunsSettings:
    """Runs that attnbench runs shows or removes."""

    experiments: str | list[str] | None
    """Folders under outputs_dir; null: all."""
    variant: str | list[str] | None
    """Runs and cells of these alone; null: all."""
    evaluation: str | list[str] | None
    """Those with results of these alone, `training` among them; null: all."""
    status: str | list[str] | None
    compare: list[str] | None
    """Two of them, by path, name, or an unambiguous beginning of a name or hash."""
    prune: str | None = setting(choices=PRUNED)
    """null: nothing is removed."""
    dry_run: bool
    """Say what would be removed, and remove nothing."""
    outputs_dir: str

    def filters(self) -> dict[str, list[str]]:
        """Return the filters that are given, each as a list."""
        given = {name: getattr(self, name) for name in ("experiments", "variant", "evaluation", "status")}
        return {name: [it] if isinstance(it, str) else it for name, it in given.items() if it is not None}


def check_runs(settings: RunsSettings) -> None:
    """Raise UserError for settings that are each allowed but impossible together."""
    for status in settings.filters().get("status", []):
        if status not in STATUSES:
            raise UserError(f"status={status}: must be one of {', '.join(STATUSES)}")
    if settings.compare is not None:
        if len(settings.compare) != 2:
            raise UserError(f"compare={settings.compare}: must name two runs, compare=[A,B]")
        if settings.prune is not None:
            raise UserError(f"compare={settings.compare} with prune={settings.prune}: do one after the other")
    if not settings.dry_run and settings.prune is None:
        raise UserError(f"dry_run=false: removes nothing without prune=; it is one of {', '.join(PRUNED)}")
