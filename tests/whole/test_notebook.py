"""The notebook of examples/: it runs, at the size of a smoke test, and is kept with its outputs."""

import json
import shutil
from pathlib import Path

import pytest
from pages import MY_LAYER
from probe_settings import smoke_words
from small import TINY_RUN

import attnbench

EXAMPLES = MY_LAYER.parents[1]
NOTEBOOK = EXAMPLES / "compare_your_mixer.ipynb"


def cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_every_cell_was_run_in_order_without_an_error():
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert NOTEBOOK.stat().st_size < 200_000


def test_it_names_nothing_of_the_machine_that_ran_it():
    assert str(Path.home()) not in NOTEBOOK.read_text()
    assert "/tmp/" not in NOTEBOOK.read_text()


@pytest.mark.slow
def test_it_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("outputs"))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    small = ["experiment=demo", *TINY_RUN, "data.path=text.txt", "device=cpu"]
    plan = {"overrides": [*small[:-1], *smoke_words("recall", "copy")], "evaluations": ["recall", "copy"]}
    plan |= {"plan": "demo", "device": "cpu", "logger": "none", "seeds": [0], "probe_seeds": [0]}
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    replaced = {"SETTINGS": plan, "MODEL": " ".join([*small, *smoke_words("perplexity")])}
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == len(replaced)
    for name, value in replaced.items():
        (cell,) = (cell for cell in tagged if f"{name} = " in cell.source)
        lines = [f"{name} = {value!r}" if line.startswith(f"{name} = ") else line for line in cell.source.splitlines()]
        cell.source = "\n".join(lines)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    assert attnbench.load(folder / "outputs" / "demo").scores["variant"].nunique() == 3
