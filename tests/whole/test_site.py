"""The site of docs/ builds without a warning, which covers links and anchors, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys

import concept_figures
import pytest
from settings_pages import settings_of

import attnbench.ops
from attnbench.settings.schema import CONF


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(pages) > 20
    assert not [
        found for page in pages for found in re.findall(r'<(?:script|link|img|iframe)\b[^>]*"(?:https?:)?//', page)
    ]


@pytest.mark.slow
def test_every_setting_and_public_name_is_explained(site, root):
    settings = "".join(path.read_text(encoding="utf-8") for path in site.glob("reference/**/*.html"))
    unknown = [
        f"{path.relative_to(CONF)}: {setting.name}"
        for group in ("", "model", "data", "train", "recipe", "logger", "eval", "bench")
        for path in (CONF / group).glob("*.yaml")
        for setting in settings_of(path)
        if setting.name.split(".")[0] not in ("_target_", "defaults", "hydra")
        and f"<code>{setting.name}</code>" not in settings
    ]
    assert not unknown
    assert not [name for name in attnbench.__all__ if f'id="attnbench.{name}"' not in settings]
    assert not [name for name in attnbench.ops.__all__ if f'id="attnbench.ops.{name}"' not in settings]


@pytest.mark.slow
def test_every_mixer_has_a_card(site):
    cards = {path.stem: path.read_text(encoding="utf-8") for path in site.glob("reference/mixers/*.html")}
    assert set(cards) == {path.stem for path in (CONF / "attn").glob("*.yaml")}
    for section in ("definition", "size", "backends", "published-verdicts", "options"):
        assert f'id="{section}"' in cards["gated_deltanet"]
    assert "delta_step" in cards["gated_deltanet"]
    assert "score_BS" in cards["softmax"]
    assert 'id="differences-from-the-paper"' in cards["mamba2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", concept_figures.FIGURES)
def test_the_figures_of_the_concepts_can_be_drawn_again(name):
    assert (concept_figures.FOLDER / f"{name}.svg").exists()
    assert concept_figures.drawn(name).startswith("<svg")
