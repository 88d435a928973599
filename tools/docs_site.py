"""Hooks of MkDocs that add to docs/ the pages that are made when the site is built (mkdocs.yml)."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_FILES = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}}
"""Pages beside docs/, and their names in the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = sorted(path.relative_to(config.docs_dir) for path in Path(config.docs_dir).glob("results/*/README.md"))
    [results] = [entry["Results"] for entry in config.nav or [] if "Results" in entry]
    results += [{path.parent.name: str(path)} for path in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, target in ROOT_FILES.items():
        files.append(File.generated(config, target, content=_as_in_docs((ROOT / name).read_text(encoding="utf-8"))))
    for name in ("CITATION.cff", "LICENSE"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _as_in_docs(text: str) -> str:
    """Turn the links of a page beside docs/ into those of a page in it."""
    return re.sub(r"\]\((?:docs/)?([^)]+)\)", lambda link: f"]({ROOT_FILES.get(link[1], link[1])})", text)
