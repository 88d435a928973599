"""Directions: a module imports only from lines above its own, and some libraries have one door."""

import ast
from pathlib import Path

import pytest

ORDER = [
    "escaping", "errors", "streams", "stopping", "documents", "settings", "registry", "identity", "jsonlines",
    "network", "results", "statistics", "figures", "tables", "families", "aggregate", "terminal", "publish",
    "kernels.support", "runtime", "locks", "process_memory", "timing", "graphs", "workers", "folder",
    "kernels",
    "layers", "mixers.base", "mixers.fla_support", "mixers.scan", "mixers", "model", "correctness", "flops", "contract",
    "matching",
    "pieces", "corpora", "hub", "wikitext", "data", "loss", "checkpoint", "progress", "metrics", "mirror", "train",
    "hooks", "divergence", "generate", "writing",
    "evals.base", "evals.options", "evals.task_data", "evals.scoring", "evals.recall_sizes", "evals.rows",
    "evals.capped_child", "evals.step_cost", "evals",
    "prepare_run", "prepare_probe", "run_training", "run_probe", "run_system",
    "cells", "coinciding", "rates", "run_model", "plan", "plan_progress", "transfer",
    "bench.roofline", "bench.base",
    "report.inputs", "report.words", "report.plots", "report.charts", "report.markup", "report.sections",
    "report.making", "report.page", "report",
    "peers.modules", "peers.cases", "peers.delta_rule", "peers.models", "peers.implementations", "peers.worker",
    "peers.rows", "peers.turns", "peers.first_step", "peers.agreement", "peers.page", "peers.benchmark",
    "peers",
    "publish_comparison", "comparison_mirror",
    "bench.gate", "bench.implementations", "bench.passes", "bench.operator",
    "bench.tables", "bench.steps", "bench.decoding", "bench.generation",
    "bench", "bench.running", "bench.page",
    "shared_operators", "examination", "doctor", "dashboard", "compare", "help_text", "reading", "config",
]  # fmt: skip
DOORS = {
    "hydra": {"config"},
    "omegaconf": {"config", "reading"},
    "wandb": {"mirror"},
    "wandb_workspaces": {"dashboard"},
    "datasets": {"hub"},
    "huggingface_hub": set(),
    "altair": {"report.charts"},
    "vl_convert": {"report.charts"},
}


def modules(root: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(root / "attnbench").with_suffix("")).replace("/", "."): path
        for path in (root / "attnbench").rglob("*.py")
        if path.name != "__init__.py"
    }


def place(module: str) -> int:
    names = [name for name in ORDER if module == name or module.startswith(f"{name}.")]
    return ORDER.index(max(names, key=len))


def imported(path: Path) -> set[str]:
    """Modules named by an import, wherever it stands; `from package import name` names package.name as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_point_one_way(root):
    own = modules(root)
    wrong = [
        f"{module} imports {name}"
        for module, path in own.items()
        for name in (name.removeprefix("attnbench.") for name in imported(path) if name.startswith("attnbench."))
        if name in own and place(name) > place(module)
    ]
    assert not wrong


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(root, library):
    users = {
        module
        for module, path in modules(root).items()
        if any(name == library or name.startswith(f"{library}.") for name in imported(path))
    }
    assert users <= DOORS[library]


def test_settings_know_no_torch(root):
    own = modules(root)
    reached, todo = set(), ["settings", "registry", "errors"]
    while todo:
        module = todo.pop()
        reached.add(module)
        names = imported(own[module])
        assert not any(name == "torch" or name.startswith("torch.") for name in names), module
        todo += [name for name in (n.removeprefix("attnbench.") for n in names) if name in own and name not in reached]


def test_scripts_are_doors_without_logic(root):
    for path in (root / "scripts").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path.name
