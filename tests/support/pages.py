"""Code and command lines that README.md and docs/ show."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")), "docs/results/README.md")
EXAMPLES = ("docs/adding_a_mixer.md", "docs/adding_an_evaluation.md", "docs/operator_tables.md", "docs/write_a_plan.md")
"""Pages that show complete files."""

MY_LAYER = ROOT / "examples" / "my_mixer" / "my_layer.py"
"""The layer of a user's that README, the notebook and tests share."""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def commands(*pages: str) -> list[str]:
    """Command lines of these pages, or of all."""
    shown = "".join(block for page in pages or PAGES for block in blocks(page, "bash"))
    lines = (line.partition("#")[0].strip() for line in shown.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def files(page: str) -> dict[str, str]:
    """Complete files by their names, each shown behind a line that ends in its name and a colon."""
    return dict(re.findall(r"`([\w./]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", read(page), re.DOTALL))


def write_files(folder: Path, *pages: str) -> None:
    for name, content in (item for page in pages for item in files(page).items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def shown_results() -> dict[str, list[tuple[str, str, str]]]:
    """Name, mean steps and number of seeds (empty: all) of the variants in each line of the README's results."""
    lines = re.findall(r"^\| ((?:better|as good|worse)[^|]*) \| (.*) \|$", read("README.md"), re.MULTILINE)
    return {
        outcome: re.findall(r"(\w+): ([\d,]*\d|never)(?: \((\d+) of 12 seeds\))?", variants)
        for outcome, variants in lines
    }
