"""Pairs recalled against bytes of state: the plan's points, their correlation and the figure."""

import pytest
import recall_state
import yaml
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from made_rows import row
from recall_state import PUBLISHED, correlation, page, points_of

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.results.row_tables import write_csv
from attnbench.settings.schema import PlanSettings
from attnbench.verdict.seeds import figures

SEEDS = (510, 511, 512)


def plan(name: str) -> PlanSettings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("compare", [f"plan={name}"], return_hydra_config=True)
        return read_comparison(config, config.hydra).plan


def scored(variant: str, mixer: str, num_bytes: float, pairs: float) -> list:
    of = {"evaluation": "ladder_recall", "mixer": mixer, "model": "ladder_recall"}
    of_level = {"split": "test", "num_pairs": 256, "chance": 0.0}
    return [
        made
        for seed, spread in zip(SEEDS, (-1, 0, 1), strict=True)
        for made in (
            row(variant, seed, "pairs_recalled", pairs + spread, settings={"split": "test", "levels": 6}, **of),
            row(variant, seed, "state_bytes", num_bytes, settings={"dim": 64}, **of),
            row(variant, seed, "accuracy", 0.5, settings=of_level, **of),
        )
    ]


def rising(number: int) -> list:
    return [made for at in range(number) for made in scored(f"v_{at}", "DeltaNet", 8000 * 1.3**at, 10 * at + 2)]


def test_the_plan_has_points_enough_over_a_wide_range_of_bytes():
    own, ladder = plan("recall_state"), plan("ladder")
    of_recall = [word for word in ladder.overrides if not word.startswith("eval.") or "ladder_recall" in word]
    assert own.overrides == of_recall
    sizes = []
    for words in own.variants.values():
        settings = compose(["eval=[ladder_recall]", "device=cpu", *own.overrides, *words])
        _, [job] = prepare_probe(settings, settings.evaluations[0])
        assert job.matched is not None
        assert not job.obstacle
        sizes.append(job.matched.state_bytes)
    assert len(sizes) >= recall_state.FEWEST
    assert max(sizes) >= 16 * min(sizes)


def test_the_correlation_is_spearmans_and_its_interval_is_over_points():
    # The ranks of the first and the last of twelve points are exchanged, and so are apart by 11, twice.
    exchanged = [(0, 11), *((at, at) for at in range(1, 11)), (11, 0)]
    assert correlation(exchanged)[0] == pytest.approx(1 - 6 * (2 * 11**2) / (12 * (12**2 - 1)))
    found, low, high = correlation([(at, at**3) for at in range(12)])
    assert (round(found, 9), round(low, 9), round(high, 9)) == (1, 1, 1)


def test_the_page_leads_with_a_failure():
    rows = rising(12)
    assert "\n".join(page(points_of(figures(rows)))).startswith("Recall goes by the bytes of the state.")
    few = "\n".join(page(points_of(figures(rising(11)))))
    assert few.startswith("**Recall does not go by the bytes of the state.** Spearman's correlation is 1.00")
    wrong = "\n".join(
        page(points_of(figures([*rows, *scored("big", "Mamba2", 1e6, 3), *scored("w", "Mamba2", 2e6, 1)])))
    )
    assert wrong.startswith("**Recall does not go by")
    assert "| big | Mamba2 | 1,000,000 | 3.0 | 2.0 to 4.0 | 3 |" in wrong


def test_the_figure_says_that_the_published_points_are_of_another_setting(tmp_path, capsys):
    write_csv(rising(12), tmp_path / "results.csv")
    recall_state.main([str(tmp_path), "--figure", str(tmp_path / "it.svg")])
    assert "over 12 points" in capsys.readouterr().out
    drawn = (tmp_path / "it.svg").read_text()
    assert "another setting" in drawn
    assert "as a share of 256" in drawn


def test_the_published_points_are_the_findings():
    claim = yaml.safe_load((CONF / "finding" / "mqar.yaml").read_text())["claim"]
    values = {it["variants"][0]: it["published"] for it in claim["contrasts"] if it["kind"] == "value"}
    names = {
        "DeltaNet": "deltanet",
        "GatedDeltaNet": "gated_deltanet",
        "GatedLinearAttention": "gla",
        "Mamba2": "mamba2",
    }
    ours = {
        f"{names[mixer]}_{width}": accuracy
        for mixer, points in PUBLISHED.items()
        for width, (_, accuracy) in zip((64, 128), points, strict=True)
    }
    assert ours.items() <= values.items()
