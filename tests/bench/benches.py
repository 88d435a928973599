"""Benches, and the conditions that they run under, for several tests."""

from typing import Any

import torch
import yaml
from small import bench_class, from_yaml

from attnbench.bench.base import Conditions
from attnbench.bench.operators.roofline import Ceilings
from attnbench.cli.compose import CONF
from attnbench.evals.lib.step_cost import Timed

ONCE = Timed(warmup=1, repeats=3, max_seconds=1.0)
CPU = Conditions(
    device=torch.device("cpu"),
    precision="float32",
    ceilings=Ceilings(1.0, 10.0),
    mixers=lambda names: [from_yaml(name) for name in names or []],
)


def bench_options(name: str, **changes: Any) -> dict[str, Any]:
    """The settings of a yaml of conf/bench at the size of a smoke test, changed."""
    content = yaml.safe_load((CONF / "bench" / f"{name}.yaml").read_text())
    del content["_target_"]
    return content | bench_class(name).smoke | changes
