"""Layers of others as mixers: a plain nn.Module on a CPU, and what is refused of flash-linear-attention there."""

import math
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any

import outside_layers
import pytest
import torch
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from mixer_building import breach
from torch import Tensor, nn

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_evaluation, read_generation
from attnbench.correctness.checks import build_mixer
from attnbench.mixers.causality import seen_of_the_future
from attnbench.mixers.contract import ALL_LENGTHS, PROMISES, causality, flops, gradients, independence, past
from attnbench.mixers.definition import MODEL, Case
from attnbench.mixers.fla_layer import FlaLayer
from attnbench.model.building import build_model, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import REFERENCE, match_mixer, match_model
from attnbench.model.stored import ModelRecord, load_checkpoint, write_files
from attnbench.results.identity import code_of
from attnbench.settings import registry
from attnbench.settings.errors import UserError
from attnbench.settings.registry import class_named
from attnbench.settings.schema import MixerSettings
from attnbench.training.job import budget

TINY = ("experiment=demo", "model=tiny", "device=cpu", "logger=none", "attn=module")
PATH = "outside_layers:Tutorial"
HOW: dict[str, Any] = {"device_type": "cpu", "precision": "float32", "seq_len": 64, "vocabulary_size": 30}


@pytest.fixture(autouse=True)
def trusted(monkeypatch) -> set[str]:
    monkeypatch.setattr(registry, "TRUSTED", set())
    return registry.TRUSTED


def model_of(*words: str, seed: int = 0) -> LanguageModel:
    settings = compose([*TINY, *words])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    return build_model([mixer] * 2, settings.model, vocabulary_size=30, seed=seed)


def test_a_plain_layer_starts_as_its_constructor_leaves_it() -> None:
    before = torch.random.get_rng_state()
    model = model_of(f"attn.path={PATH}", "attn.options.scale=3.0", "attn.options.num_heads=4")
    assert torch.equal(torch.random.get_rng_state(), before)
    inner: Any = model.layers[0].mixer.inner
    assert isinstance(inner, outside_layers.Tutorial)
    assert inner.num_heads == 4
    assert torch.equal(inner.gain.data, torch.full((128,), 3.0))
    assert torch.equal(inner.mask, torch.tril(torch.ones(512, 512)))
    # As nn.Linear fills its weights; by the seed, and otherwise in every layer.
    assert inner.qkv.weight.abs().max() <= 128**-0.5
    other: Any = model.layers[1].mixer.inner
    assert not torch.equal(inner.qkv.weight, other.qkv.weight)
    again: Any = model_of(f"attn.path={PATH}").layers[0].mixer.inner
    assert torch.equal(inner.qkv.weight, again.qkv.weight)
    third: Any = model_of(f"attn.path={PATH}", seed=1).layers[0].mixer.inner
    assert not torch.equal(inner.qkv.weight, third.qkv.weight)


def test_it_keeps_the_contract_but_for_a_state() -> None:
    def build() -> Any:
        return model_of(f"attn.path={PATH}").layers[0].mixer

    case = Case(name="", head_width=64)
    for check in (causality, past, independence, gradients):
        promise = type("Promise", (), {"check": staticmethod(check)})
        assert breach(promise, build, case) == ""  # pyright: ignore[reportArgumentType]
    mixer = build()
    with pytest.raises(UserError, match=r"attn\.path=outside_layers:Tutorial: has no state to decode with"):
        mixer.init_state(1, 8, torch.float32)
    with pytest.raises(UserError, match="has no state"):
        mixer(torch.zeros(1, 2, 128), ())


def test_its_operations_are_counted() -> None:
    mixer = model_of(f"attn.path={PATH}").layers[0].mixer
    length, pairs = 31, 31 * 32 // 2
    # Two products over pairs of positions, of each head the half that is causal, and a division of each score.
    assert pairs * 4 * 128 <= mixer.mixing_flops(length) <= 1.1 * pairs * 4 * 128


def test_a_convolution_by_fourier_transforms_keeps_the_contract_and_is_counted() -> None:
    settings = compose([*TINY, "attn.path=outside_layers:LongConvolution"]).mixer
    mixer = build_mixer(resolve_mixer(settings, MODEL, device_type="cpu", precision="float32"), torch.device("cpu"))
    case = replace(ALL_LENGTHS, lengths=(65,))
    assert {promise.words: promise.check(mixer, case) for promise in PROMISES if not promise.needs_state} == {
        promise.words: "" for promise in PROMISES if not promise.needs_state
    }
    assert not seen_of_the_future(mixer, MODEL.dim, 256)
    # Two transforms of real numbers forward and one back, each of twice the length, and a product of the spectra. All
    # of the filter's rows count as used at every position, which is taken back here.
    for length in (31, 256):
        transforms = 3 * 2.5 * 2 * length * math.log2(2 * length) * MODEL.dim
        expected = transforms + 6 * (length + 1) * MODEL.dim - 2 * 2048 * MODEL.dim * length
        assert abs(mixer.mixing_flops(length) / expected - 1) < 1e-4


def test_operations_that_cannot_be_counted_are_unknown_and_do_not_refuse_a_training() -> None:
    settings = compose([*TINY, "attn.path=outside_layers:Unlisted"])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    model = build_model([mixer] * 2, settings.model, vocabulary_size=30, seed=0)
    assert model.forward_flops(64) is None
    assert flops(model.layers[0].mixer, ALL_LENGTHS) == ""
    found = match_model([mixer] * 2, settings.model, match="none", seq_len=64, vocabulary_size=30)
    row = next(iter(budget(found)))
    assert (row.value, row.status, row.reason) == (None, "unsupported", "an unknown number of operations")


def test_a_circular_convolution_sees_the_future_and_its_share_is_written_in_digits() -> None:
    with pytest.raises(UserError, match=r"position 0 sees position 23: \d\.\de[-+]\d\d of its gradient lies ahead"):
        model_of("attn.path=outside_layers:CircularConvolution")


def test_a_norm_over_positions_is_named_with_its_remedy() -> None:
    with pytest.raises(UserError, match=r"sees position .* \(BatchNorm1d: averages over positions; nn\.LayerNorm and"):
        model_of("attn.path=outside_layers:BatchNormed")


def test_is_matched_by_parameters_and_has_no_state_to_match() -> None:
    settings = compose([*TINY, f"attn.path={PATH}"])
    found = match_mixer(settings.mixer, settings.model, match="params", **HOW)
    assert abs(found.parameters / found.reference_parameters - 1) <= 0.01
    assert found.state_bytes is None
    with pytest.raises(UserError, match=r"^match=state: Module names no setting that decides its state"):
        match_mixer(settings.mixer, settings.model, match="state", **HOW)


def test_a_checkpoint_that_names_one_is_refused_until_its_words_are_given_again(tmp_path, trusted) -> None:
    settings = compose([*TINY, f"attn.path={PATH}", "attn.options.scale=3.0"])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    model = build_model([mixer] * 2, settings.model, vocabulary_size=30, seed=0)
    sizes: dict[str, Any] = {"vocabulary_size": 30, "corpus": "", "seq_len": 8, "precision": "float32"}
    write_files(tmp_path, model, ModelRecord(mixers=[mixer] * 2, model=settings.model, vocabulary=["a"], **sizes), {})
    trusted.clear()
    with pytest.raises(UserError, match=r"attn\.path=outside_layers:Tutorial: runs code .* give attn\.path=outside_l"):
        load_checkpoint(tmp_path, device="cpu")
    again, _ = load_checkpoint(tmp_path, device="cpu", trusted=[PATH])
    final = tmp_path / "run" / "checkpoint" / "final"
    shutil.copytree(tmp_path, final, ignore=shutil.ignore_patterns("run"))
    of_run, _ = load_checkpoint(tmp_path / "run", device="cpu")
    assert all(map(torch.equal, again.parameters(), of_run.parameters()))
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens)[0], model(tokens)[0])


def test_random_and_changed_buffers_are_in_a_checkpoint(tmp_path) -> None:
    settings = compose([*TINY, "attn.path=outside_layers:RandomFeatures"])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    model = build_model([mixer] * 2, settings.model, vocabulary_size=30, seed=0)
    assert not torch.equal(*(block.mixer.inner.omega for block in model.layers))
    model.layers[0].mixer.inner.omega[0, 0] = 3.0
    sizes: dict[str, Any] = {"vocabulary_size": 30, "corpus": "", "seq_len": 8, "precision": "float32"}
    write_files(tmp_path, model, ModelRecord(mixers=[mixer] * 2, model=settings.model, vocabulary=["a"], **sizes), {})
    again, _ = load_checkpoint(tmp_path, device="cpu")
    for block, other in zip(model.layers, again.layers, strict=True):
        assert torch.equal(block.mixer.inner.omega, other.mixer.inner.omega)


def test_its_source_is_part_of_the_identity() -> None:
    mixer = compose([*TINY, f"attn.path={PATH}"]).mixer
    sources = code_of([class_named(mixer)], [])["sources"]
    assert list(sources) == ["outside_layers.Tutorial"]
    assert len(sources["outside_layers.Tutorial"]) == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attn.path=outside_layers:SeesAhead"], r"SeesAhead: position 0 sees position \d+: .* it is not built$"),
        (["attn.path=outside_layers:BeginsAtZero"], r"BeginsAtZero: position 0 sees position 1: .* it is not built$"),
        (["attn.path=outside_layers:Drops"], r"outside_layers:Drops: two passes over one input differ by \S+; "),
        (
            ["attn.path=outside_layers:Narrows"],
            r"an input \(2, 24, 128\) became \(2, 24, 127\); a mixer keeps",
        ),
        (
            ["attn.path=outside_layers:ReturnsTwo"],
            r"ReturnsTwo: returns a tuple, not one tensor; return the output alone$",
        ),
        (
            ["attn.path=outside_layers:Raises"],
            r"Raises: raises for an input .*: ValueError: not today, at /.*/outside_layers\.py:\d+$",
        ),
        (["attn.path=outside_layers:Weightless"], r"Weightless: has no parameters"),
        (
            ["attn.path=outside_layers:Nobody"],
            r"^attn\.path=outside_layers:Nobody: outside_layers has no Module",
        ),
        (
            ["attn.path=outside_layers:OtherWidth"],
            r"^attn\.options\.size: must be given; if it is the model's width, name it dim or d_model or ",
        ),
        (["attn.path=no_such_file:Layer"], r"^attn\.path=no_such_file:Layer: there is no module no_such_file; "),
        (
            ["attn.path=some/layers.py:Layer"],
            r"must be package:Class, not a file; PYTHONPATH=some before the command and attn\.path=layers:Layer name",
        ),
        (["attn.path=outside_layers:Untrained"], r"Untrained: its output has no gradient, .*; remove no_grad or det"),
        (["attn.path=outside_layers:NotFinite"], r"NotFinite: its output for random numbers is not finite"),
        (["attn.path=math:pi"], r"^attn\.path=math:pi: pi of math is 3\.14.*, and must be a class derived from Module"),
        (["attn.path=outside_layers"], r"^attn\.path=outside_layers: must be package:Class$"),
        (
            [f"attn.path={PATH}", "attn.options.heads=3"],
            r"^attn\.options\.heads=3: unknown setting \(did you mean num",
        ),
        ([f"attn.path={PATH}", "attn.options.num_heads=two"], r"^attn\.options\.num_heads=two: must be an integer$"),
        ([], r"^attn\.path: must be given, for example attn\.path=my_package\.layers:Layer$"),
    ],
)
def test_what_is_no_mixer_is_refused_when_it_is_built(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        model_of(*words)
    assert "\n" not in str(refusal.value)


def test_the_width_is_given_under_each_of_its_names() -> None:
    assert model_of("attn.path=outside_layers:NamedWidth").layers[0].mixer.inner.out.weight.shape == (128, 128)


def test_a_layer_of_a_hybrid_can_be_one() -> None:
    words = ("attn=hybrid", "attn.layers=[module,linear]", f"attn.options.module.path={PATH}")
    settings = compose([*TINY[:-1], *words, "attn.options.module.options={scale: 2.0}"])
    found = match_mixer(settings.mixer, settings.model, match="params", **HOW)
    model = build_model(found.mixers, found.model, vocabulary_size=30, seed=0)
    assert [type(block.mixer).__name__ for block in model.layers] == ["Module", "LinearAttention"]
    assert model.backend_without_state == "torch"
    # As of a mixer of a user's that keeps no name of its only backend.
    del model.layers[0].mixer.backend
    assert model.backend_without_state == "torch"


def test_a_layer_of_the_library_says_on_a_cpu_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"^attn=fla attn\.layer=GLA: needs CUDA and flash-linear-attention .*cpu$"):
        compose([*TINY[:-1], "attn=fla", "attn.layer=GLA"])
    with pytest.raises(UserError, match=r"^attn\.layer: must be given, for example attn\.layer=GatedDeltaProduct$"):
        compose([*TINY[:-1], "attn=fla"])


def test_a_compiler_that_is_wrong_about_the_library_is_refused_without_naming_a_backend_it_has_not(monkeypatch) -> None:
    of_layer = "attnbench.mixers.fla_layer"
    monkeypatch.setattr(f"{of_layer}.util.find_spec", lambda name: object())
    monkeypatch.setattr(f"{of_layer}.metadata.version", lambda name: "3.6.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    words = r"^attn=fla attn\.layer=GLA: triton 3\.6\.0 .*; install triton>=3\.7\.1 or take a mixer of attnbench's own"
    with pytest.raises(UserError, match=words):
        FlaLayer.choose_backend({"layer": "GLA", "backend": "auto"}, device_type="cuda", precision="bfloat16")


@pytest.fixture
def library(monkeypatch) -> None:
    """A stand-in with the library's shape: a constructor that swallows every word, an output of three."""

    class Doubled(nn.Module):
        def __init__(self, hidden_size: int = 64, num_heads: int = 4, layer_idx: int | None = None, **kwargs: Any):
            super().__init__()
            if num_heads == 0:
                raise ValueError("none at all")
            self.num_heads, self.layer_idx, self.kwargs = num_heads, layer_idx, kwargs
            self.projection = nn.Linear(hidden_size, hidden_size)
            self.A_log = nn.Parameter(torch.ones(num_heads))
            self.A_log._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

        def forward(self, hidden_states: Tensor) -> tuple[Tensor, None, None]:
            # As kernels launched without memory do to the whole process.
            assert not hidden_states.is_meta, "illegal memory access"
            return self.projection(hidden_states) * self.A_log.sum(), None, None

    layers = ModuleType("fla.layers")
    vars(layers).update({"Doubled": Doubled, "__all__": ["Doubled"]})
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", layers)


def test_a_layer_of_the_library_gets_the_model_s_sizes_and_checked_options(library) -> None:
    def made(**options: Any) -> Any:
        return FlaLayer(dim=32, head_width=8, layer_index=3, layer="Doubled", options=options)

    mixer = made(num_heads=2)
    assert (mixer.inner.num_heads, mixer.inner.layer_idx, mixer.inner.kwargs) == (2, 3, {})
    assert made().inner.num_heads == 4
    assert mixer(torch.ones(1, 5, 32))[0].shape == (1, 5, 32)
    assert mixer.no_weight_decay == {"inner.A_log"}
    with pytest.raises(UserError, match=r"^attn\.options\.num_head=2: unknown setting \(did you mean num_heads\?\)"):
        made(num_head=2)
    with pytest.raises(UserError, match=r"^attn\.options\.kwargs=2: unknown setting; there is hidden_size, num"):
        made(kwargs=2)
    with pytest.raises(
        UserError,
        match=r"^attn\.layer=Doubled: its constructor raises ValueError: none at all, at /.*/test_adapters\.py:\d+$",
    ):
        made(num_heads=0)
    with pytest.raises(UserError, match=r"^attn\.layer=Double: unknown \(did you mean Doubled\?\); fla\.layers has"):
        FlaLayer(dim=32, head_width=8, layer="Double")
    with pytest.raises(UserError, match=r"^attn\.layer=Doubled: has no state"):
        mixer.init_state(1, 4, torch.float32)


def test_a_layer_of_the_library_is_matched_by_parameters_and_has_no_flops(library, monkeypatch) -> None:
    monkeypatch.setattr(FlaLayer, "choose_backend", classmethod(lambda cls, options, **where: "fla"))
    mixer = MixerSettings(name="fla", target=registry.FLA_LAYER, options={"layer": "Doubled", "options": {}})
    settings = compose(TINY[:-1])
    found = match_mixer(mixer, settings.model, match="params", **HOW)
    assert found.flops_per_token is None
    assert ") and an unknown number of operations, feed_forward_width " in found.statement("fla")
    row = next(iter(budget(found)))
    assert (row.metric, row.value, row.status) == ("forward_flops_per_token", None, "unsupported")
    with pytest.raises(UserError, match=r"^match=flops: the model of softmax, fla has an unknown number of operations"):
        match_model([REFERENCE, mixer], settings.model, match="flops", seq_len=64, vocabulary_size=30)
    model = build_model(found.mixers, found.model, vocabulary_size=30, seed=0)
    assert model.forward_flops(64) is None


def test_the_library_s_version_is_part_of_the_identity(monkeypatch) -> None:
    monkeypatch.setattr("attnbench.results.identity.metadata.version", lambda name: "0.6.0")
    options = {"layer": "GLA", "options": {}, "backend": "fla"}
    mixer = MixerSettings(name="fla", target=registry.FLA_LAYER, options=options)
    assert code_of([class_named(mixer)], []) == {"sources": {"fla.layers.GLA": "flash-linear-attention 0.6.0"}}


def test_without_the_library_its_version_is_asked_for_in_one_line(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("attnbench.results.identity.metadata.version", none)
    with pytest.raises(UserError, match=r"fla\.layers\.GLA: flash-linear-attention is not installed"):
        code_of(["fla.layers.GLA"], [])


@pytest.mark.parametrize(("script", "read"), [("evaluate", read_evaluation), ("generate", read_generation)])
def test_the_words_of_a_later_command_line_trust_a_class_again(script: str, read: Any, trusted) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for words in ([], [f"attn.path={PATH}"]):
            config = compose_hydra(script, ["run=/nowhere", *words], return_hydra_config=True)
            with pytest.raises(UserError, match=r"^run=/nowhere: config\.yaml cannot be read"):
                read(config, config.hydra)
            assert trusted == {PATH.replace(":", ".") for _ in words}
