"""Write the yamls of conf/eval and conf/bench from the options of their classes.

python tools/write_yamls.py
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

from attnbench.bench.base import Bench
from attnbench.evals.base import Evaluation
from attnbench.settings.options import as_yaml
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF

GROUPS = {"eval": Evaluation, "bench": Bench}


def yamls() -> Iterator[tuple[Path, str]]:
    """Each yaml that names a class, and its content."""
    for group, base in GROUPS.items():
        for path in sorted((CONF / group).glob("*.yaml")):
            target = yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_")
            if target is not None:
                package = f"eval.{path.stem}" if group == "eval" else ""
                yield path, as_yaml(resolve(target, base), target, package)


if __name__ == "__main__":
    for path, content in yamls():
        path.write_text(content, encoding="utf-8")
