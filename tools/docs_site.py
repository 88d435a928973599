"""Hooks of MkDocs that add to docs/ the pages that are made when the site is built (mkdocs.yml).

They are not files of docs/: the code has their content, so that they cannot be out of date. `conf/*.yaml`, whose
comments they show, and docstrings are what GitHub's readers read in their place.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]
import mixer_cards  # noqa: E402
import settings_pages  # noqa: E402

import attnbench.ops  # noqa: E402

ROOT_FILES = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}}
"""Pages beside docs/, and their names in the site."""

API = {
    "attnbench": (
        "Runs, models and results.",
        [*(f"attnbench.{name}" for name in attnbench.__all__), "attnbench.report.results.Results"],
    ),
    "attnbench.ops": (
        "Operators as functions of tensors (B, T, H, K). They need only torch, and Triton on CUDA.",
        [f"attnbench.ops.{name}" for name in attnbench.ops.__all__],
    ),
    "A mixer of your own": (
        "`Mixer` is the interface. `RecurrentMixer` has all of it but the recurrence.",
        [
            "attnbench.mixers.base.Mixer",
            *(f"attnbench.mixers.shell.{name}" for name in ("Shell", "RecurrentMixer")),
            "attnbench.ops.common.recurrence.Recurrence",
        ],
    ),
    "An evaluation of your own": (
        "A class derives from one of these; its annotated fields are its settings.",
        [
            f"attnbench.evals.base.{name}"
            for name in ("Evaluation", "CheckpointEvaluation", "SystemEvaluation", "Probe")
        ],
    ),
}
"""Sections of the page of the API: a sentence, and the objects that each describes."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add to the navigation the pages of which there are as many as there are results and mixers."""
    pages = sorted(path.relative_to(config.docs_dir) for path in Path(config.docs_dir).glob("results/*/README.md"))
    _section(config.nav, "Results").extend({path.parent.name: str(path)} for path in pages)
    cards = [{name: f"reference/mixers/{name}.md"} for name in mixer_cards.names()]
    _section(_section(config.nav, "Reference"), "Mixers").extend(cards)
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Link files beside docs/ where the site has them, and the mixers of the table on their page to their cards."""
    name = page.file.src_uri
    if "/" not in name:
        markdown = markdown.replace("](../", "](")
    if name == "mixers.md":
        to_card = r"| [\1](reference/mixers/\1.md) |"
        markdown = re.sub(r"^\| (\w+) \|", to_card, markdown, flags=re.MULTILINE)
    return markdown


def _section(nav: Any, title: str) -> list[Any]:
    [section] = [entry[title] for entry in nav if title in entry]
    return section


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in _pages():
        files.append(File.generated(config, name, content=content))
    for name in ("CITATION.cff", "LICENSE", "examples/compare_your_mixer.ipynb"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _pages() -> Iterator[tuple[str, str]]:
    for name, target in ROOT_FILES.items():
        yield target, _as_in_docs((ROOT / name).read_text(encoding="utf-8"))
    for name, content in settings_pages.pages():
        yield f"reference/settings/{name}", content
    for name, content in mixer_cards.pages():
        yield f"reference/mixers/{name}.md", content
    yield "reference/api.md", _api()


def _api() -> str:
    sections = []
    for title, (sentence, names) in API.items():
        sections.append(f"## {title}\n\n{sentence}\n\n" + "".join(map(settings_pages.described, names)))
    return "# Python API\n\n" + "".join(sections)


def _as_in_docs(text: str) -> str:
    """Turn the links of a page beside docs/ into those of a page in it."""
    return re.sub(r"\]\((?:docs/)?([^)]+)\)", lambda link: f"]({ROOT_FILES.get(link[1], link[1])})", text)
