"""README.md says only what is true: its tables are the published ones, its rooms the folders, its Python runs."""

import ast
import re
import subprocess
import sys

import pytest
from pages import PAGES, blocks, read
from probe_settings import BATTERY

import attnbench
from attnbench import ROOMS

README = read("README.md")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> list[str]:
    """Names that the lines of a section's table begin with."""
    return re.findall(r"^\| (\w+) \|", section(title), re.MULTILINE)


def test_it_is_read_at_one_sitting():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short_and_links_lead_somewhere(root, page):
    text = read(page)
    # Lines of tables, pictures and commands cannot be broken.
    prose = re.sub(r"^```bash\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not [line for line in prose.splitlines() if len(line) > 120 and line[0] not in "|!"]
    for link in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (root / page).parent / path if path else root / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles], link


def test_the_battery_is_the_one_of_its_yaml():
    assert sorted(first_column("The battery")) == BATTERY


def test_the_rooms_are_named_in_their_order():
    assert first_column("The rooms") == ["room", *ROOMS]


@pytest.mark.parametrize("published", ["language_model-h200", "findings-cpu"])
def test_a_table_of_results_has_lines_of_the_published_one(published):
    lines = re.findall(r"^\|.*", (read(f"docs/results/{published}/README.md")), re.MULTILINE)
    shown = [line for table in re.findall(r"(?:^\|.*\n)+", section("Results"), re.MULTILINE) if lines[0] in table
             for line in table.splitlines()]  # fmt: skip
    assert len(shown) > 2
    assert shown == [line for line in lines if line in shown]


def test_the_verdicts_that_it_tells_are_those_of_the_published_page():
    told = section("Results").partition("The frozen protocol")[2]
    verdicts = read("docs/results/small-cpu/README.md").partition("The verdicts in full:")[2]
    by_pair = {
        (pair, metric): text
        for pair, metric, text in re.findall(
            r"^- (\w+ is better than \w+) in ([\w ]+) of .*?: (.*)$", verdicts, re.MULTILINE
        )
    }
    perplexity, copying = "nats per character", "symbol accuracy"
    of_it = by_pair["gated_deltanet is better than softmax", perplexity]
    mean, low, high = re.findall(r"-(\d+\.\d)", of_it)
    assert f"better than softmax in perplexity, by {mean} % [{high}, {low}]," in told
    for pair in ("softmax is better than gated_deltanet", "softmax is better than linear"):
        assert (pair, copying) in by_pair
    assert ("softmax is better than linear", perplexity) in by_pair


def test_the_names_that_python_gets_are_of_attnbench_itself(root):
    code = ast.parse(
        "\n".join(block for page in PAGES[:-1] for block in blocks(page, "python") if "class " not in block)
    )
    imports = [node for node in ast.walk(code) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == {"attnbench"}
    assert {alias.name for node in imports for alias in node.names} <= set(attnbench.__all__)
    assert all(callable(getattr(attnbench, name)) for name in attnbench.__all__)


def test_importing_attnbench_loads_neither_torch_nor_hydra(root):
    loaded = "import attnbench, sys; print({'torch', 'hydra'} & set(sys.modules), attnbench.compose.__module__)"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout == "set() attnbench.cli.compose\n"
