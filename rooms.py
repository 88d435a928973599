"""Moves every module of attnbench/ into its room, and every test beside it: `python rooms.py`, once.

Whole files move, names of modules follow wherever they are written, imports are sorted anew; nothing else changes.
"""

import re
import subprocess
from pathlib import Path

ROOMS = {
    "settings": "errors escaping documents settings=schema registry",
    "machine": "runtime=device timing graphs=cuda_graph process_memory=memory workers=processes "
    "evals.capped_child=capped_child locks stopping=signals streams network kernels.support=kernel_support",
    "results": "identity results=rows jsonlines=files folder tables publish",
    "data": "corpora=texts pieces hub wikitext data=batches",
    "mixers": "layers correctness=definition contract flops",
    "model": "model=language_model loss matching generate=sampling",
    "training": "checkpoint hooks divergence metrics progress mirror=wandb train=loop prepare_run=prepare",
    "evals.runners": "run_training=training prepare_probe run_probe=probe run_system=system",
    "evals.lib": "evals.task_data=task_data evals.scoring=scoring evals.rows=rows evals.step_cost=step_cost "
    "evals.recall_sizes=recall_sizes evals.options=options",
    "verdict": "statistics figures=seeds families=ranking",
    "correctness": "examination=backends shared_operators=operators doctor",
    "report": "aggregate=summary terminal comparison_mirror=wandb dashboard=workspace",
    "comparison": "cells coinciding rates=search run_model plan plan_progress=progress transfer compare "
    "publish_comparison=publish",
    "cli": "config=compose reading help_text=help writing",
}
TESTS = {
    "settings": "config",
    "machine": "locks stopping streams timing two_processes workers",
    "results": "identity results disk",
    "data": "corpora data hub wikitext",
    "kernels": "kernels_doctor kernels_flash_attention kernels_flash_decoding kernels_gated_delta_rule "
    "kernels_launching kernels_linear_attention kernels_shared kernels_short_convolution",
    "mixers": "attention layers mixers recurrent_mixers",
    "model": "generate model",
    "training": "checkpoint metrics mirror numbers progress train",
    "evals": "evals evaluate inference probes_tasks run_probe run_system system_evals run",
    "verdict": "statistics aggregate",
    "correctness": "doctor gpu",
    "bench": "bench bench_decode bench_models bench_profile bench_traces gpu_profile",
    "report": "report dashboard",
    "comparison": "compare plans rates transfer",
    "cli": "submitit",
    "peers": "peers peers_models",
    "whole": "compiled_for demo docs fuzz golden host_memory hostile readme soak structure supply",
}
DOCSTRINGS = {
    "settings": "What may be asked for: settings, their rules, errors. Nothing here loads torch.",
    "machine": "The device and its processes: precision, timing, memory, locks, signals. Nothing here reads a config.",
    "results": "What was measured, on disk: rows, files, folders, identities, tables.",
    "data": "Text to tokens to batch n, a function of (seed, n).",
    "ops": "The recurrences of mixers as operators.",
    "model": "The model around a mixer, its loss, its matching, its samples. Nothing here trains.",
    "training": "One training: its steps, what happens around them, and what is kept of it.",
    "evals.runners": "How evaluations of each kind are run.",
    "evals.lib": "What several evaluations share.",
    "verdict": "What may be said of scores: statistics over seeds, and who is separated from whom.",
    "correctness": "Fast forms held against definitions, on this device.",
    "comparison": "Many jobs: a plan, its cells, its searches of rates, carried out.",
    "cli": "Command line to settings, and mistakes to one line.",
}
DONE = "attn-bench"
"""Stands for the package in imports that are written anew, until all others are."""

PATHS = {
    "attnbench/results/folder.py": [("parents[1]", "parents[2]")],
    "attnbench/settings/schema.py": [('__file__).parent / "conf"', '__file__).parents[1] / "conf"')],
    "tests/training/test_mirror.py": [("__file__).parents[1]", "__file__).parents[2]")],
    "tests/machine/test_workers.py": [("__file__).parents[1]", "__file__).parents[2]")],
    "tests/whole/test_readme.py": [("parents[1]", "parents[2]")],
    "tests/training/test_checkpoint.py": [('__file__).parent / "data"', '__file__).parents[1] / "data"')],
    "Makefile": [
        ("--ignore-glob='*test_kernels*'", "--ignore=tests/kernels"),
        ("tests/test_kernels_*.py", "tests/kernels"),
    ],
}


def main() -> None:
    modules = {}
    for room, words in ROOMS.items():
        for word in words.split():
            old, _, new = word.partition("=")
            modules[old] = f"{room}.{new or old}"
    for old, new in modules.items():
        move(f"attnbench/{old.replace('.', '/')}.py", f"attnbench/{new.replace('.', '/')}.py")
    for room, words in TESTS.items():
        for word in words.split():
            move(f"tests/test_{word}.py", f"tests/{room}/test_{word}.py")
    move("attnbench/peers", "benchmarks/peers")
    for room, words in DOCSTRINGS.items():
        path = Path("attnbench", *room.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{words}"""\n')
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        new = renamed(text, modules) if path.suffix != ".json" else text
        for before, after in PATHS.get(str(path), []):
            assert before in new, (path, before)
            new = new.replace(before, after)
        if new != text:
            path.write_text(new, encoding="utf-8")


def move(old: str, new: str) -> None:
    Path(new).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", old, new], check=True)


def tracked() -> list[Path]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\n")
    kinds = {".py", ".md", ".yaml", ".toml", ""}
    kept = ("docs/results/", "tests/data/", "rooms.py", "LICENSE", ".ci")
    paths = [Path(name) for name in names if name and not name.startswith(kept)]
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.suffix in kinds]


def renamed(text: str, modules: dict[str, str]) -> str:
    """The text with the new names: `attnbench.train.x`, attnbench/train.py, `from attnbench import checkpoint`."""

    def module(match: re.Match) -> str:
        parts = match[1].split(".")
        if parts[0] == "peers":
            return f"benchmarks.{match[1]}"
        for depth in range(len(parts), 0, -1):
            name = ".".join(parts[:depth])
            if name in modules:
                return ".".join(["attnbench", modules[name], *parts[depth:]])
        return match[0]

    def file(match: re.Match) -> str:
        name = match[1].replace("/", ".")
        if name.startswith("peers."):
            return f"benchmarks/{match[1]}.py"
        return f"attnbench/{modules.get(name, name).replace('.', '/')}.py"

    def names(match: re.Match) -> str:
        lines = []
        for name in match[3].split(","):
            package = match[2] or ""
            word, _, alias = name.strip().partition(" as ")
            new = modules.get(f"{package}.{word}".strip("."))
            if new is None:
                home = "benchmarks.peers" if package == "peers" else f"{DONE}.{package}".strip(".")
                lines.append(f"{match[1]}from {home} import {name.strip()}")
                continue
            room, _, last = new.rpartition(".")
            kept = f" as {alias or word}" if (alias or word) != last else ""
            lines.append(f"{match[1]}from {DONE}.{room} import {last}{kept}")
        return "\n".join(lines)

    def test(match: re.Match) -> str:
        room = next(room for room, words in TESTS.items() if match[1] in words.split())
        return f"tests/{room}/test_{match[1]}.py"

    text = re.sub(
        r"^([ \t]*)from attnbench(?:\.([a-z_.]+))? import ((?:[a-z_]+(?: as \w+)?)(?:, [a-z_]+(?: as \w+)?)*)$",
        lambda m: names(m) if touches(m, modules) else m[0],
        text,
        flags=re.M,
    )
    text = re.sub(r"\battnbench\.([a-z_]+(?:\.[a-z_]+)*)", module, text).replace(DONE, "attnbench")
    text = re.sub(r"\battnbench/([a-z_/]+)\.py\b", file, text)
    return re.sub(r"\btests/test_([a-z_]+)\.py\b", test, text)


def touches(match: re.Match, modules: dict[str, str]) -> bool:
    """Whether an import from a package names one of its modules, as `from attnbench import checkpoint` does."""
    package = match[2] or ""
    is_module = package in modules
    words = [name.strip().partition(" as ")[0] for name in match[3].split(",")]
    return not is_module and any(f"{package}.{word}".strip(".") in modules for word in words)


if __name__ == "__main__":
    main()
