"""Publish a workspace for the battery in wandb, or write it as JSON: `python scripts/dashboard.py`; see --help."""

import argparse
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line


@ending_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", default="attnbench", help="of wandb, as logger.project")
    parser.add_argument("--entity", help="user or team, as logger.entity; yours if not given")
    parser.add_argument(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="offline writes JSON, auto if not logged in",
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/dashboard.json"), help="the JSON")
    given = parser.parse_args()
    # Imported here: torch takes seconds to load, and a Ctrl-C meanwhile is one line too.
    from attnbench.report.workspace import make_dashboard
    from attnbench.settings.schema import LoggerSettings

    print(make_dashboard(LoggerSettings(mode=given.mode, project=given.project, entity=given.entity), given.output))


if __name__ == "__main__":
    main()
