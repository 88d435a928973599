"""Hybrids: their words on a command line, and models whose layers differ, matched, counted, stored and decoded."""

from typing import Any

import pytest
import torch

from attnbench.cli.compose import CONF, compose
from attnbench.cli.mistakes import EXAMPLES
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.model.building import build_model, resolve_mixer
from attnbench.model.matching import match_mixer
from attnbench.model.stored import ModelRecord, load_model, write_files
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import backends_of, classes_of, layers_of, parts_of, pattern, with_backends
from attnbench.settings.schema import MixerSettings

TINY = ("experiment=demo", "model=tiny", "device=cpu", "logger=none", "model.num_layers=4", "seq_len=64")
HOW: dict[str, Any] = {"device_type": "cpu", "precision": "float32", "seq_len": 64, "vocabulary_size": 30}
WORDS = ("attn=hybrid", "attn.layers=[gated_deltanet*3,window]", "attn.options.window.window=16")


def matched(match: str = "params") -> Any:
    settings = compose([*TINY, *WORDS])
    return match_mixer(settings.mixer, settings.model, match=match, **HOW)


def test_a_pattern_is_repeated_over_the_depth() -> None:
    assert pattern(["linear*2", "softmax"]) == ["linear", "linear", "softmax"]
    settings = compose([*TINY, *WORDS, "model.num_layers=8"])
    assert [layer.name for layer in layers_of(settings.mixer, 8)] == [
        "gated_deltanet",
        *["gated_deltanet"] * 2,
        "window",
    ] * 2
    plain = MixerSettings(name="softmax", target="attnbench.mixers.softmax.Softmax", options={})
    assert layers_of(plain, 3) == [plain] * 3


def test_each_mixer_has_its_yaml_its_overrides_and_the_parts_of_a_recipe() -> None:
    parts = parts_of(compose([*TINY, *WORDS, "recipe=equipped", "attn.options.gated_deltanet.conv_size=2"]).mixer)
    assert parts["window"].options == compose_mixers_of("window") | {
        **{"window": 16, "conv_size": 4, "qk_norm": True, "output_norm": True, "output_gate": "silu"},
    }
    assert parts["gated_deltanet"].options == compose_mixers_of("gated_deltanet") | {"conv_size": 2}


def compose_mixers_of(name: str) -> dict:
    return compose([*TINY, f"attn={name}"]).mixer.options


def test_a_probe_s_wishes_go_to_each_mixer_that_has_the_setting_unless_it_is_named() -> None:
    settings = compose([*TINY, *WORDS[:1], "attn.layers=[linear,window]", "attn.options.linear.conv_size=2"])
    evaluation = compose([*TINY, "eval=[recall]", "eval.recall.preset=small", "eval.recall.cells=null"]).evaluations[0]
    _, jobs = prepare_probe(settings, evaluation)
    assert [layer.options["conv_size"] for layer in jobs[0].mixers] == [2, 4]
    assert jobs[0].columns()["mixer"] == "LinearAttention+Window"


def test_is_matched_and_counted_layer_by_layer() -> None:
    found = matched()
    model = build_model(found.mixers, found.model, vocabulary_size=30, seed=0)
    assert [type(block.mixer).__name__ for block in model.layers] == ["GatedDeltaNet"] * 3 + ["Window"]
    assert found.parameters == model.num_parameters()
    assert abs(found.parameters / found.reference_parameters - 1) <= 0.01
    one_layer = compose([*TINY, "model.num_layers=1"]).model
    parts = parts_of(compose([*TINY, *WORDS]).mixer).values()
    delta, window = (match_mixer(part, one_layer, match="none", **HOW).state_bytes for part in parts)
    assert found.state_bytes == 3 * delta + window
    by_state = matched(match="state")
    # A window of 16 has the bytes of a memory of 32 × 32 a head: nothing need be changed.
    assert by_state.mixers == found.mixers
    assert by_state.state_mismatch == 0
    assert classes_of(found.mixers) == "GatedDeltaNet+Window"


def test_decodes_and_is_stored_with_a_mixer_a_layer(tmp_path) -> None:
    found = matched(match="none")
    model = build_model(found.mixers, found.model, vocabulary_size=30, seed=0).double()
    tokens = torch.randint(30, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, _ = model(tokens)
    state = model.init_state(2, 40, torch.float64)
    logits, state = model(tokens[:, :30], state)
    assert torch.allclose(logits, expected[:, :30], atol=1e-9)
    for position in range(30, 40):
        logits, state = model.step(tokens[:, position], state)
        assert torch.allclose(logits, expected[:, position], atol=1e-9)
    sizes: dict[str, Any] = {"vocabulary_size": 30, "corpus": "", "seq_len": 64, "precision": "float32"}
    record = ModelRecord(mixers=found.mixers, model=found.model, vocabulary=["a"], **sizes)
    write_files(tmp_path, model.float(), record, {})
    again, stored = load_model(tmp_path)
    assert stored.mixers == found.mixers
    assert torch.equal(again(tokens)[0], model(tokens)[0])


def test_backends_of_layers_are_named_and_taken_back() -> None:
    layers = matched().mixers
    assert backends_of(layers) == "torch"
    mixed = with_backends(layers, "torch+torch+torch+triton")
    assert [layer.options["backend"] for layer in mixed] == ["torch"] * 3 + ["triton"]
    assert backends_of(mixed) == "torch+torch+torch+triton"
    with pytest.raises(UserError, match="names 2 for 4 layers"):
        with_backends(layers, "torch+triton")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attn=[softmax,linear]"], r"^attn=\[softmax,linear\]: .* attn=hybrid 'attn\.layers=\[softmax,linear\]'"),
        (["attn=hybrid"], r"^attn\.layers: must be given, for example 'attn\.layers=\[gated_deltanet,window\]'$"),
        (["attn=hybrid", "attn.layers=[]"], r"^attn\.layers=\[\]: must name at least one mixer$"),
        (["attn=hybrid", "attn.layers=[linear*0]"], r"^attn\.layers=\[linear\*0\]: linear\*0: the count must be 1 to"),
        (["attn=hybrid", "attn.layers=[linear*x]"], r"linear\*x: the count must be 1 to 1000$"),
        (["attn=hybrid", "attn.layers=[hybrid]"], r"names a hybrid; a layer has one mixer$"),
        (["attn=hybrid", "attn.layers=[linea]"], r"^attn=linea: unknown \(did you mean linear\?\)"),
        (["attn=hybrid", "attn.layers=[linear*2,softmax]"], r"\[linear\*2,softmax\]: 3 layers, repeated, do not make"),
        ([*WORDS, "attn.options.softmax.conv_size=4"], r"^attn\.options\.softmax: .* has no softmax; it has gated_del"),
        (
            [*WORDS, "attn.options.window.windo=4"],
            r"^attn\.options\.window\.windo=4: unknown setting \(did you mean wi",
        ),
        ([*WORDS, "attn.options.window.window=0"], r"^attn\.options\.window\.window=0: must be at least 1$"),
        ([*WORDS, "attn.options.window=3"], r"^attn\.options=\{'window': 3\}: must be a mapping"),
        ([*WORDS, "attn.options.window._target_=os.system"], r"window\._target_=os\.system: its yaml has the class$"),
        (
            [*WORDS, "attn.options.window.head_width=48"],
            r"^head_width=48: must divide model\.dim=128; .* attn\.options\.window\.head_width .* 1, 2, .* 64, 128$",
        ),
        ([*WORDS, "attn.options.window.backend=sdpa"], r"^attn\.options\.window\.backend=sdpa: Window has auto, torch"),
        ([*WORDS, "attn.conv_size=4"], r"^attn\.conv_size=4: unknown setting; there is layers, options$"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        compose([*TINY, *words])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_the_layers_that_the_message_gives_work_with_every_model(model: str) -> None:
    words = EXAMPLES["attn.layers"].strip("'")
    settings = compose(["experiment=demo", f"model={model}", "device=cpu", "logger=none", "attn=hybrid", words])
    assert len(layers_of(settings.mixer, settings.model.num_layers)) == settings.model.num_layers


def test_a_cache_among_its_layers_has_no_state_to_match() -> None:
    settings = compose([*TINY, "attn=hybrid", "attn.layers=[gated_deltanet,softmax]"])
    resolved = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    assert list(parts_of(resolved)) == ["gated_deltanet", "softmax"]
    with pytest.raises(UserError, match="match=state: the state of softmax grows"):
        match_mixer(settings.mixer, settings.model, match="state", **HOW)
