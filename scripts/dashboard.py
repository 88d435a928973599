"""Publishes a workspace for the battery in wandb, or writes it as JSON: `python scripts/dashboard.py`; see --help."""

import argparse
import sys
from pathlib import Path

from attnbench.dashboard import make_dashboard
from attnbench.errors import UserError
from attnbench.settings import LoggerSettings


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
    try:
        print(make_dashboard(LoggerSettings(mode=given.mode, project=given.project, entity=given.entity), given.output))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
