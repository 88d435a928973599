"""Numbers that the README and docs repeat from docs/results are those of the rows there."""

import gzip
import json
import re
from functools import cache
from statistics import fmean, median

import pytest
import yaml
from pages import ROOT, read, shown_results

from attnbench.report.inputs import read_inputs
from attnbench.report.sections.answer import sentences
from attnbench.results.row_tables import read_csv, table_of
from attnbench.results.rows import ResultRow
from attnbench.verdict.statistics import SignFlip


@cache
def rows_of(page: str) -> list[ResultRow]:
    rows = read_csv(table_of(ROOT / "docs/results" / page))
    return [row for row in rows if row.measurement.value is not None]


def value(page: str, variant: str, metric: str, evaluation: str, **settings: object) -> float:
    found = [
        row.measurement.value or 0
        for row in rows_of(page)
        if (row.identity.variant, row.measurement.metric, row.identity.evaluation) == (variant, metric, evaluation)
        and settings.items() <= row.measurement.settings.items()
    ]
    assert found, (page, variant, metric, settings)
    return fmean(found)


def table(text: str, head: str) -> list[list[str]]:
    lines = re.findall(r"(?:^\|.*\n)+", text[text.index(head) :], re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(path.parent.name for path in (ROOT / "docs/results").glob("*/comparison.json")))
def test_a_comparison_s_answer_is_what_its_rows_say_by_the_present_rules(page):
    shown = read(f"docs/results/{page}/README.md")
    inputs = read_inputs(ROOT / "docs/results" / page)
    assert [line for line in sentences(inputs) if f"- {line}" not in shown] == []
    assert without_git(inputs.frozen) in without_git(shown)


def without_git(text: str) -> str:
    """Leave out since when a freeze is in git: a shallow clone does not know it."""
    return re.sub(r" \(freeze\.json in [^)]*\)", "", text)


def test_training_speeds_by_length_are_those_of_the_battery():
    names, *lines = table(read("docs/results/README.md"), "| characters |")
    for length, *cells in lines:
        size = int(length.replace(",", ""))
        for name, cell in zip(names[1:], cells, strict=True):
            if cell:
                at = {"sequence_length": size, "batch_size": 32_768 // size}
                speed = value("battery-h100", name, "tokens_per_second", "throughput", **at)
                assert cell == f"{speed / 1e6:.2f}", (name, length)


@pytest.mark.slow
def test_prompts_decoding_and_states_are_those_of_all_mixers():
    _, *lines = table(read("docs/results/README.md"), "| variant | prompts")
    assert len(lines) == 21
    for name, prompts, one, many, state in lines:
        where = "mixers-h100", name
        speeds = [
            value(*where, f"{what}_tokens_per_second", "inference", batch_size=size)
            for what, size in (("prefill", 128), ("decode", 1), ("decode", 128))
        ]
        assert [prompts, one, many] == [f"{speeds[0] / 1e6:.1f}", *(f"{speed:,.0f}" for speed in speeds[1:])]
        assert state == f"{value(*where, 'state_bytes', 'inference'):,.0f}"


def test_why_flash_attention_is_fast_has_the_numbers_of_its_table():
    names, *lines = table(read("docs/operator_tables.md"), "| | textbook |")
    variants = {"textbook": "textbook", "compiled": "compiled", "SDPA's flash kernel": "sdpa_flash", "ours": "triton"}
    metrics = ("forward_milliseconds", "backward_milliseconds", "memory_before_backward_mib")
    for metric, (_, *cells) in zip(metrics, lines, strict=True):
        for name, cell in zip(names[1:], cells, strict=True):
            shape = {"head_width": 64, "sequence_length": 8192, "causal": True, "batch_size": 8, "num_heads": 1}
            measured = value("attention-h200", variants[name], metric, "attention", **shape)
            shown = float(cell.replace(",", ""))
            digits = len(cell.partition(".")[2])
            assert abs(shown - measured) <= 0.5 * 10.0**-digits + 1e-9, (metric, name)


def test_steps_beside_peers_are_those_of_their_page():
    _, *lines = table(read("docs/results/README.md"), "| mixer, batch × tokens")
    fla = {"linear": "fla LinearAttentionForCausalLM", "gated_deltanet": "fla GatedDeltaNetForCausalLM"}
    for shape, ours, peer, its, ratio, memory in lines:
        [(mixer, length, layers)] = re.findall(r"^(\w+), \d+ × ([\d,]+), (\d+) × \d+$", shape)
        case = f"{mixer}-12x768" if (mixer, layers) == ("flash", "12") else f"{mixer}-{length.replace(',', '')}"
        variants = ("attnbench", {"nanoGPT": "nanoGPT, compiled", "fla": fla.get(mixer)}.get(peer, peer))
        speeds = [value("peers-h200", name, "tokens_per_second", "peers", case=case) for name in variants]
        peaks = [value("peers-h200", name, "peak_memory_mib", "peers", case=case) for name in variants]
        times = value("peers-h200", "attnbench", "tokens_per_second_ratio", "peers", case=case, peer=variants[1])
        assert [ours, its] == [f"{speed:,.0f}" for speed in speeds]
        assert [ratio, memory] == [f"{times:.2f}", "{:,.0f} and {:,.0f}".format(*peaks)]


def test_what_a_training_takes_to_start_is_what_the_rows_say():
    """From their least to their most seconds, rounded alike."""
    told = " ".join(read("docs/results/README.md").split())
    names = ("softmax", "flash", "gated_deltanet", "linear")
    started = {
        cache: [value("peers-h200", name, "start_seconds", "first_step", cache=cache) for name in names]
        for cache in ("cold", "warm")
    }
    steps = [value("peers-h200", name, "first_step_seconds", "first_step", cache="warm") for name in names]
    rest = [whole - step for whole, step in zip(started["warm"], steps, strict=True)]
    cold, warm = started.values()
    assert f"takes {min(cold):.0f} to {max(cold):.0f} s to start with empty compiler caches" in told
    assert (
        f"caches and {min(warm):.1f} to {max(warm):.1f} s with filled ones, {min(rest):.1f} to {max(rest):.1f}" in told
    )


@pytest.mark.slow
def test_what_the_parts_are_worth_is_the_mean_over_the_corners():
    """Perplexity's nats on the test text, without a part less with it."""
    told = " ".join(read("docs/results/README.md").split())

    def means(page: str, mixer: str) -> dict[frozenset[str], float]:
        names = {row.identity.variant for row in rows_of(page) if row.identity.variant.split("+")[0] == mixer}
        (length,) = {row.identity.seq_len for row in rows_of(page) if row.identity.evaluation == "perplexity"}
        place = {"split": "test", "checkpoint": "best", "context": "full", "sequence_length": length}
        return {
            frozenset(name.split("+")[1:]): value(page, name, "nats_per_character", "perplexity", **place)
            for name in names
        }

    def worth(corners: dict[frozenset[str], float], part: str) -> float:
        without, having = ([nats for corner, nats in corners.items() if (part in corner) is on] for on in (False, True))
        return fmean(without) - fmean(having)

    softmax, linear, delta = (means("factorial-h100", name) for name in ("softmax", "linear", "gated_deltanet"))
    pairs = [[worth(corners, part) for corners in (softmax, linear)] for part in ("positions", "convolution", "gate")]
    positions, convolution, gate = (f"{one:.3f} and {other:.3f}" for one, other in pairs)
    assert "positions are worth {} nats to softmax and {} to linear".format(*positions.split(" and ")) in told
    assert f"a convolution {convolution}, a gate {gate}; to Gated DeltaNet" in told
    deltas = [worth(delta, part) for part in ("positions", "convolution", "gate")]
    assert "to Gated DeltaNet {:.3f}, {:.3f} and {:.3f}.".format(*deltas) in told
    bare = frozenset()
    lead = softmax[bare] - delta[bare]
    assert f"{lead:.3f} nats a character ahead of softmax ({delta[bare]:.3f} and {softmax[bare]:.3f})" in told
    small = [means("small_factorial-cpu", name)[bare] for name in ("softmax", "gated_deltanet")]
    assert f"is {small[0] - small[1]:.2f} nats a character ahead of softmax, with positions" in told


@pytest.mark.slow
def test_trainings_of_recall_end_at_the_steps_that_are_told():
    steps = [
        row.measurement.value or 0
        for row in rows_of("mixers-h100")
        if (row.identity.evaluation, row.measurement.metric) == ("recall", "steps_trained")
    ]
    assert f"have taken {max(steps):,.0f} steps." in " ".join(read("docs/results/README.md").split())
    assert f"within {max(steps):,.0f} steps (softmax: 340)" in " ".join(read("README.md").split())


def test_single_trainings_are_those_of_their_pages():
    told = " ".join(read("docs/results/README.md").split())
    best = {"sequence_length": 256, "checkpoint": "best", "split": "test", "context": "full"}
    names = ("gated_deltanet", "softmax")
    scores = [value("language_model-h200", name, "perplexity", "perplexity", **best) for name in names]
    assert "of softmax ({:.3f} and {:.3f}), by one seed".format(*scores) in told
    for name, _, speed in table(read("docs/backends.md"), "| mixer | backend | million token/s |")[1:]:
        assert speed == f"{value('language_model-h200', name, 'tokens_per_second', 'training') / 1e6:.2f}"
    whole, first = (
        sum(value("published_training-h200", name, metric, "training") for name in (*names, "linear"))
        for metric in ("train_seconds", "first_step_seconds")
    )
    assert f"which take {whole:.0f} s, {first:.0f} of them to compile" in told


def test_what_the_readme_says_is_not_equal_is_what_the_rows_say():
    told = " ".join(read("README.md").split())
    of = "mixers-h100"

    def flops(name: str) -> float:
        return value(of, name, "forward_flops_per_token", "training")

    for name in ("mamba2", "mamba3"):
        assert round(100 * (flops(name) / flops("softmax") - 1)) == 16
        assert (
            7
            < value(of, name, "state_bytes", "inference") / value(of, "gated_deltanet", "state_bytes", "inference")
            < 8
        )
    assert (
        "mamba2 and mamba3 take 16 % more FLOPs than softmax, and over seven times the state of gated_deltanet" in told
    )
    sizes_told = (of, "1m", "0.73 million parameters"), ("battery-h100", "4m", "at 3.8 million parameters")
    for page, model, words in sizes_told:
        sizes = {
            row.identity.parameters
            for row in rows_of(page)
            if (row.identity.variant, row.identity.model) == ("softmax", model)
        }
        (size,) = {size for size in sizes if size}
        assert words.split(" million")[0].split()[-1] == f"{size / 1e6:.2g}"
        assert words in told


def test_recall_by_bytes_of_state_is_that_of_the_frontier():
    text = " ".join(read("docs/results/README.md").split())
    told = text[text.index("varies the bytes:") : text.index("## Long prompts")]
    page, at = "frontier-h100", {"sequence_length": 512, "width": 64}

    def recalled(variant: str, **settings: object) -> float:
        return value(page, variant, "accuracy", "recall", split="test", **at | settings)

    def state(variant: str, **settings: object) -> str:
        return f"{value(page, variant, 'state_bytes', 'recall', **at | settings):,.0f}"

    single = "simple_gla", "gated_deltanet", "deltanet", "kda", "gla"
    expected = (0.997, 0.994, 0.992, 0.983, 0.969)
    assert [round(recalled(name), 3) for name in single] == list(expected)
    assert {state(name) for name in single} == {"37,376"}
    for share in expected:
        assert re.search(rf"{share}\b", told)
    assert (round(recalled("softmax"), 3), state("softmax")) == (1.0, "528,912")
    assert round(528_912 / 37_376) == 14
    changes = {name: recalled(f"{name}_2") - recalled(name) for name in single}
    assert changes.pop("kda") == pytest.approx(-0.03, abs=0.005)
    assert max(map(abs, changes.values())) <= 0.006
    assert f"{recalled('linear'):.2f} in {state('linear')} bytes" in told
    assert f"{recalled('linear', width=128):.3f} in {state('linear', width=128)}" in told
    assert f"recalls {recalled('window_64'):.2f} in {state('window_64')} bytes" in told
    assert recalled("window_64", width=128) - recalled("window_64") == pytest.approx(0.01, abs=0.005)
    assert state("window_64", width=128) == f"{2 * 70_160 - 16:,}"
    # Nothing larger is 0.01 ahead of the smallest.
    rows = [row for row in rows_of(page) if (row.measurement.metric, row.identity.variant) == ("accuracy", "softmax")]
    assert len(rows) >= 20
    names = {row.identity.variant for row in rows_of(page)}
    best = recalled("simple_gla")
    assert all(recalled(name, width=width) <= best + 0.01 for name in names for width in (64, 128))


def test_steps_beside_other_workers_of_a_card_are_those_of_the_frontier_s_cells():
    text = " ".join(read("docs/clusters.md").split())
    told = text[text.index("**On a GPU** further workers") : text.index("There further workers")]
    took: dict[tuple[object, ...], list[float]] = {}
    for line in gzip.decompress((ROOT / "docs/results/frontier-h100/cells.jsonl.gz").read_bytes()).splitlines():
        entry = json.loads(line)
        for row in map(json.loads, entry["text"].splitlines() if "/results/" in entry["path"] else ()):
            if row.get("metric") == "tokens_per_second":
                settings = row["settings"]
                tokens = settings["sequence_length"] * settings["evaluation_options"]["batch_size"]
                key = row["variant"], settings["sequence_length"], settings["width"], row["commit"][:7]
                assert settings["stack"] == 1
                took.setdefault(key, []).append(1000 * tokens / row["value"])
    for model, shown in ((("linear", 512, 128), (15.4, 85.2, 134)), (("gla", 256, 64), (4.7, 25.6, 40.6))):
        for commit, num_workers, number in zip(("e33fcea", "b39da5b", "61cd619"), (1, 5, 8), shown, strict=True):
            step = median(took[*model, commit])
            assert step == pytest.approx(number, abs=0.5 if number > 100 else 0.05)
            assert re.search(rf"{number}\b", told)
            assert num_workers == 1 or f"{step / num_workers:.1f}" in told


def test_published_sizes_score_what_the_results_say():
    told = " ".join(read("docs/results/README.md").split())
    told = told[told.index("[published-h100](published-h100/README.md) is the comparison") :]
    best = {"sequence_length": 256, "checkpoint": "best", "split": "test", "context": "full"}
    for name, words in (
        ("gated_deltanet", "Gated DeltaNet, with {size} million parameters, comes to a perplexity of {score}"),
        ("softmax", "softmax, with {size}, to {score}"),
        ("linear", "linear attention, with nothing around it, to {score}"),
    ):
        rows = [row for row in rows_of("published-h100") if row.identity.variant == name]
        (size,) = {row.identity.parameters for row in rows if row.identity.evaluation == "training"}
        nats = value("published-h100", name, "perplexity", "perplexity", **best)
        assert words.format(size=f"{(size or 0) / 1e6:.1f}", score=f"{nats:.2f}") in told
        recall = value("published-h100", name, "accuracy", "recall", num_pairs=15)
        copied = value("published-h100", name, "symbol_accuracy", "copy", length=50, beyond_training=False)
        assert [recall > 0.98, copied > 0.98] == [name != "linear"] * 2


def scored(page: str, variant: str, metric: str, evaluation: str, seeds: range, **settings: object) -> dict:
    """Values by seed, of the seeds of a page's scores alone: neither the control's nor a search's."""
    return {
        row.identity.seed: row.measurement.value
        for row in rows_of(page)
        if (row.identity.variant, row.measurement.metric, row.identity.evaluation) == (variant, metric, evaluation)
        and row.identity.seed in seeds
        and settings.items() <= row.measurement.settings.items()
    }


def test_steps_of_recall_are_those_of_the_rows():
    """A training of recall ends soon after an accuracy of 0.95: its steps separate variants, not where it ended."""
    shown = [variant for variants in shown_results().values() for variant in variants]
    assert len(shown) == 21
    for name, steps, some in [*shown, ("softmax", "340", "")]:
        took = scored("mixers-h100", name, "steps_to_95", "recall", range(120, 132))
        assert len(took) == (0 if steps == "never" else int(some or 12)), name
        assert steps == (f"{fmean(took.values()):,.0f}" if took else "never"), name
    assert "(softmax: 340)" in read("README.md")
    pairs = {"sequence_length": 512, "num_pairs": 64}
    softmax, delta, linear, nope = (
        scored("battery-h100", name, "steps_to_95", "recall", range(100, 110), **pairs)
        for name in ("softmax", "gated_deltanet", "linear", "softmax_nope")
    )
    assert (len(softmax), len(delta), len(linear), len(nope)) == (10, 10, 0, 10)
    means = [f"{fmean(took.values()):,.0f}" for took in (softmax, delta, nope)]
    told = " ".join(read("README.md").split())
    assert "learns to recall 64 pairs in {} steps where Gated DeltaNet takes {}.".format(*means[:2]) in told
    told = " ".join(read("docs/results/README.md").split())
    assert "after {} steps on average, and every seed of Gated DeltaNet, after {};".format(*means[:2]) in told
    assert f"Softmax without positions takes {means[2]} steps" in told


def test_both_measures_of_copying_50_symbols_are_told():
    """The battery and the comparison of all mixers train one cell on other seeds."""
    shown, level = {}, 1 - 0.05 / 8
    for page, seeds in (("battery-h100", range(100, 110)), ("mixers-h100", range(120, 132))):
        for name in ("gated_deltanet", "linear"):
            softmax, other = (scored(page, it, "symbol_accuracy", "copy", seeds, length=50) for it in ("softmax", name))
            differences = [softmax[seed] - other[seed] for seed in seeds]
            low, high = SignFlip().interval(differences, level, resolution=1e-9)
            shown[page, name] = f"{fmean(differences):.2f} [{low:.2f}, {high:.2f}]"
    for page in ("README.md", *(f"docs/results/{name}README.md" for name in ("", "battery-h100/", "mixers-h100/"))):
        told = " ".join(read(page).split())
        assert all(shown[of, "gated_deltanet"] in told for of in ("battery-h100", "mixers-h100")), page
        if page != "README.md":
            assert all(shown[of, "linear"] in told for of in ("battery-h100", "mixers-h100")), page


def test_rates_of_every_mixer_hold_with_both_neighbours_but_for_the_one_that_the_page_names():
    """The table's search trained two rates in full; searches.jsonl.gz has the best one's other neighbours."""
    folder = ROOT / "docs" / "results" / "mixers-h100"
    curves, chosen = {}, {}
    for search in json.loads((folder / "comparison.json").read_text())["rates"]:
        if search["evaluation"] == "training":
            curves[search["variant"]] = {float(rate): [*nats] for rate, nats in search["seeds"].items()}
            chosen[search["variant"]] = search["chosen"]
    with gzip.open(folder / "searches.jsonl.gz", "rt") as lines:
        files = {line["path"]: line["text"] for line in map(json.loads, lines)}
    rates = {path.split("/")[0]: yaml.safe_load(text) for path, text in files.items() if path.endswith("config.yaml")}
    for path, text in files.items():
        for row in map(json.loads, text.splitlines() if path.endswith(".jsonl") else ()):
            if row.get("metric") == "nats_per_character":
                rate = rates[row["run"]]["train"]["learning_rate"]
                curves[row["variant"]].setdefault(rate, []).append(row["value"])
    means = {name: {rate: fmean(nats) for rate, nats in curve.items()} for name, curve in curves.items()}
    best = {name: min(curve, key=curve.__getitem__) for name, curve in means.items()}
    grid = [0.001 * 2**step for step in range(6)]
    for name, curve in curves.items():
        index = grid.index(best[name])
        assert {*grid[index - 1 : index + 2]} <= curve.keys(), name
        assert all(len(nats) == 3 for nats in curve.values()), name
    assert {name for name, rate in best.items() if rate != chosen[name]} == {"softmax_sigmoid"}
    told = " ".join(read("docs/results/mixers-h100/README.md").split())
    assert f"for softmax by {means['softmax'][0.004] - means['softmax'][0.008]:.4f} nats a character" in told
    gained = means["softmax_sigmoid"][0.016] - means["softmax_sigmoid"][0.004]
    assert f"which is {gained:.4f} nats ({gained:.2%} of perplexity)".replace("%", " %") in told
    assert f"({len(rates)} trainings more" in told
