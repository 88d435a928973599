"""README.md says only what is true: its tables are the published ones, and its Python runs."""

import ast
import re
import subprocess
import sys

import pytest
from pages import MY_LAYER, PAGES, blocks, read, shown_results
from probe_settings import BATTERY

import attnbench
from attnbench import PACKAGES

README = read("README.md")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> list[str]:
    return re.findall(r"^\| (\w+) \|", section(title), re.MULTILINE)


def tables(title: str) -> list[list[str]]:
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)]


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
    assert sorted(first_column("Evaluations")) == BATTERY


def test_the_packages_are_named_in_their_order():
    named = re.findall(r"^\| (\w+) \|", read("docs/architecture.md"), re.MULTILINE)
    assert named[: len(PACKAGES) + 1] == ["package", *PACKAGES]


def test_the_table_of_results_has_the_verdicts_of_the_published_page():
    shown = {outcome: [name for name, _, _ in variants] for outcome, variants in shown_results().items()}
    published = {outcome: names for (outcome, evaluation), names in outcomes().items() if evaluation == "Perplexity"}
    assert shown == published
    assert sum(map(len, published.values())) == 21


def test_no_page_explains_perplexity_by_decays_that_depend_on_the_input():
    """Decays begin at half-lives that this bench gives all mixers but RetNet: no control tells the two apart."""
    for page in ("README.md", "docs/results/README.md", "docs/results/mixers-h100/README.md"):
        assert "decay that depends on its input" not in " ".join(read(page).split())


def outcomes() -> dict[tuple[str, str], list[str]]:
    """Variants as the answer of the page of all mixers has them, by how they compare with softmax, and in what."""
    page, found = read("docs/results/mixers-h100/README.md"), {}
    ending = r"(?:, (more|less) than (?:1|0\.01|matters)[^,]*)?"
    lines = re.findall(rf"^- Better: ((\w+) (?:(recalls)|has) .*?){ending}\.$", page, re.MULTILINE)
    for text, winner, recalls, size in lines:
        if winner == "softmax":
            names = re.findall(r" than (\w+)", text)
        else:
            names = [winner, *re.findall(r"(\w+) [\d.]+ (?:% )?\[", text.partition("; also ")[2])]
        by = {"more": " by more than 1 %", "less": " by less than 1 %"}.get(size, "")
        outcome = "worse" if winner == "softmax" else "better"
        found.setdefault((outcome + by, "Recall" if recalls else "Perplexity"), []).extend(names)
    alike = re.findall(r"^- Equivalent: (\w+).*: as good as softmax are (.*)\.$", page, re.MULTILINE)
    return found | {("as good", name): re.findall(r"(\w+) [-+]?\d\S* (?:% )?\[", text) for name, text in alike}


def test_the_verdicts_that_it_tells_are_those_of_the_published_pages():
    told = " ".join(section("Results").split())
    battery = "battery-h100"
    for page, words in ((battery, "after at most 400 steps: by "), ("bare-h100", "softmax copies better by ")):
        percent = re.findall(r"\d+", verdict(page, "softmax copies", "more of 100 symbols than gated_deltanet"))
        share, *ends = (f"{int(number) / 100:.2f}" for number in percent)
        assert f"{words}{share} [{', '.join(ends)}]" in told
    first_screen = " ".join(README.partition("## Compare your mixer")[0].split())
    lower = verdict(battery, "softmax has", "lower perplexity than gated_deltanet")
    assert f"softmax attention has {lower} lower perplexity than Gated DeltaNet" in first_screen
    assert "neither mixer is shown to be better in perplexity or recall" in told
    bare = read("docs/results/bare-h100/README.md")
    undecided = re.findall(r"^- gated_deltanet and softmax in (?:.* of )?(\w+) at .*, undecided", bare, re.MULTILINE)
    assert undecided == ["recall", "perplexity"]
    assert "by less than matters" in read(f"docs/results/{battery}/README.md")
    assert "the control, softmax trained again, is neither better nor worse than softmax" in told
    for page in (battery, "mixers-h100"):
        said = read(f"docs/results/{page}/README.md")
        assert "Control: softmax against itself under other seeds came out neither better nor worse" in said


def verdict(page: str, winner: str, than: str) -> str:
    """The figure of a published verdict and its bounds: 0.49 % [0.15, 0.83]."""
    verdicts = read(f"docs/results/{page}/README.md").partition("The verdicts in full:")[2]
    [figures] = re.findall(rf"^- {winner} ([\d.]+(?: %)? \[[^]]*\]) {than} at ", verdicts, re.MULTILINE)
    return figures


def test_the_names_that_python_gets_are_of_attnbench_itself(root):
    code = ast.parse(
        "\n".join(block for page in PAGES[:-1] for block in blocks(page, "python") if "class " not in block)
    )
    imports = [node for node in ast.walk(code) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == {"attnbench", "my_layer"}
    of_it = [node for node in imports if node.module == "attnbench"]
    names = {alias.name for node in of_it for alias in node.names}
    names |= {node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute) and _is_attnbench(node.value)}
    assert names <= {*attnbench.__all__, "ops"}
    assert all(callable(getattr(attnbench, name)) for name in attnbench.__all__)


def test_the_layer_of_the_readme_is_that_of_the_examples():
    (shown,) = (block for block in blocks("README.md", "python") if "class MyLayer" in block)
    assert re.sub(r'""".*?"""', "", MY_LAYER.read_text(), flags=re.DOTALL).split() == shown.split()


def _is_attnbench(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "attnbench"


def test_importing_attnbench_loads_neither_torch_nor_hydra(root):
    loaded = "import attnbench, sys; print({'torch', 'hydra'} & set(sys.modules), attnbench.compose.__module__)"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout == "set() attnbench.cli.compose\n"
