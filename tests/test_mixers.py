"""The contract of a mixer, over every yaml of conf/attn. A new mixer is under it as soon as its yaml exists."""

import copy
import inspect
import warnings

import pytest
import torch
from mixer_building import FROM_MODEL, assert_near, backend, build, example_input, mixer_names, read
from torch import Tensor
from torch.func import functional_call

from attnbench.errors import UserError
from attnbench.mixers.base import Mixer, state_bytes

# Around the border of a chunk of 64, and over two of them with a ragged end.
LENGTHS = (1, 63, 64, 65, 133)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}
TOGGLED = ({"conv_size": 0}, {"conv_size": 4}, {"output_gate": False}, {"output_gate": True}, {"qk_norm": False})
TOGGLED += ({"qk_norm": True},)

every_mixer = pytest.mark.parametrize("name", mixer_names())
every_option = pytest.mark.parametrize("change", TOGGLED, ids=lambda change: "-".join(map(str, *change.items())))


def build_changed(name: str, change: dict, **kwargs) -> Mixer:
    if not change.keys() <= read(name)[1].keys():
        pytest.skip(f"{name} has no {', '.join(change)}")
    return build(name, **change, **kwargs)


def output_and_gradients(mixer: Mixer, y: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * weight).sum(), (x, *parameters))
    return {"output": y.detach(), **dict(zip(("input", *names), gradients, strict=True))}


def in_pieces(mixer: Mixer, x: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """The outputs of consecutive calls that hand the state on; a piece of 1 is a step."""
    state = mixer.init_state(x.shape[0], x.shape[1], x.dtype)
    outputs = []
    for piece in x.split(pieces, dim=1):
        if piece.shape[1] == 1:
            y, state = mixer.step(piece[:, 0], state)
            outputs.append(y[:, None])
        else:
            y, state = mixer(piece, state)
            outputs.append(y)
    return torch.cat(outputs, dim=1)


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_and_dtype_are_kept(name, dtype):
    mixer = build(name, dtype=dtype)
    for length in LENGTHS:
        x = example_input(2, length, dtype=dtype)
        y, state = mixer(x)
        assert (y.shape, y.dtype, state) == (x.shape, dtype, None)
        assert y.isfinite().all()


@every_mixer
@pytest.mark.parametrize("position", [0, 63, 64, 100])
def test_sees_the_past_and_not_the_future(name, position):
    x = example_input(2, 133).requires_grad_()
    y, _ = build(name)(x)
    (gradient,) = torch.autograd.grad(y[:, position].square().sum(), x)
    assert not gradient[:, position + 1 :].any()
    # Every earlier position counts, the oldest too.
    assert gradient[:, : position + 1].abs().amax(-1).gt(0).all()


@every_mixer
def test_sequences_of_a_batch_do_not_mix(name):
    mixer = build(name)
    x = example_input(3, 70).requires_grad_()
    y, _ = mixer(x)
    (gradient,) = torch.autograd.grad(y[1].square().sum(), x)
    assert not gradient[0].any()
    assert not gradient[2].any()
    assert_near(y[1:2], mixer(x[1:2])[0], TOLERANCE[torch.float32])


@every_mixer
@every_option
def test_every_parameter_gets_a_gradient(name, change):
    mixer = build_changed(name, change)
    mixer(example_input(2, 70))[0].square().sum().backward()
    for parameter_name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@every_mixer
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fast_form_equals_definition(name, length, dtype):
    check_against_definition(build(name, dtype=dtype), length, dtype)


@every_mixer
@every_option
def test_fast_form_equals_definition_with_options(name, change):
    check_against_definition(build_changed(name, change, dtype=torch.float64), 70, torch.float64)


@every_mixer
def test_fast_form_nears_definition_in_bfloat16(name):
    check_against_definition(build(name, dtype=torch.bfloat16), 133, torch.bfloat16)


def check_against_definition(mixer: Mixer, length: int, dtype: torch.dtype, tolerance: float | None = None) -> None:
    """Outputs and gradients against the definition in float64, from the same rounded weights and inputs."""
    x, weight = example_input(2, length, dtype=dtype), example_input(2, length, dtype=dtype, seed=1)
    exact, wide = copy.deepcopy(mixer).double(), x.double().requires_grad_()
    expected = output_and_gradients(exact, exact.reference(wide), wide, weight.double())
    x.requires_grad_()
    actual = output_and_gradients(mixer, mixer(x)[0], x, weight)
    for what, tensor in actual.items():
        assert_near(tensor, expected[what], TOLERANCE[dtype] if tolerance is None else tolerance, what)


@every_mixer
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_equals_pieces_and_single_steps(name, length):
    mixer = build(name, dtype=torch.float64)
    if backend(name) in mixer.trains_only:
        pytest.skip(f"{backend(name)} only trains")
    x = example_input(2, length, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = mixer(x)
        third = max(length // 3, 1)
        for pieces in (
            (length,),
            (1,) * length,
            (third,) * (length // third) + (length % third,) * (length % third > 0),
        ):
            assert_near(in_pieces(mixer, x, pieces), whole, TOLERANCE[torch.float64], str(pieces))


@every_mixer
@every_option
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_equals_pieces_with_options(name, change, dtype):
    mixer = build_changed(name, change, dtype=dtype)
    x = example_input(2, 133, dtype=dtype)
    with torch.no_grad():
        whole, _ = mixer(x)
        for pieces in ((64, 65, 1, 3), (1, 1, 63, 68)):
            assert_near(in_pieces(mixer, x, pieces), whole, TOLERANCE[dtype], str(pieces))


@every_mixer
def test_state_is_updated_in_place(name):
    mixer = build(name)
    with torch.no_grad():
        state = mixer.init_state(2, 80, torch.float32)
        addresses = [tensor.data_ptr() for tensor in state]
        for length in (70, 1):
            _, state = mixer(example_input(2, length), state)
            assert [tensor.data_ptr() for tensor in state] == addresses
        assert any(tensor.any() for tensor in state)


@every_mixer
def test_state_grows_only_if_it_says_so(name):
    mixer = build(name)
    short, long = (state_bytes(mixer.init_state(1, length, torch.bfloat16)) for length in (64, 128))
    assert (long > short) == mixer.state_grows
    assert long >= short


@every_mixer
def test_functional_call(name):
    mixer = build(name)
    x, parameters = example_input(2, 70), dict(build(name).named_parameters())
    changed = {key: 1.5 * value for key, value in parameters.items()}
    mixer_of_changed = build(name)
    mixer_of_changed.load_state_dict(changed)
    actual, expected = functional_call(mixer, changed, (x,))[0], mixer_of_changed(x)[0]
    assert_near(actual, expected, 1e-6)
    assert not torch.equal(actual, mixer(x)[0])


@every_mixer
def test_vmap_over_stacked_parameters(name):
    mixer = build(name)
    if backend(name) in mixer.without_vmap:
        pytest.skip(f"{backend(name)} has no batching rule")
    x = example_input(2, 133)
    scales = torch.tensor([1.0, 1.3, 0.7])
    parameters = {key: value.detach() for key, value in mixer.named_parameters()}
    stacked = {key: torch.stack([scale * value for scale in scales]) for key, value in parameters.items()}
    stacked = {key: value.requires_grad_() for key, value in stacked.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(mixer, values, (x,))[0].square().sum()

    with warnings.catch_warnings():
        # An operator without a batching rule runs in a loop and warns.
        warnings.simplefilter("error", UserWarning)
        losses = torch.vmap(loss)(stacked)
        losses.sum().backward()
    for run, scale in enumerate(scales):
        alone = {key: (scale * value).requires_grad_() for key, value in parameters.items()}
        expected = loss(alone)
        expected.backward()
        assert_near(losses[run], expected, 1e-5)
        for key, value in alone.items():
            assert_near(stacked[key].grad[run], value.grad, 1e-4, key)


@every_mixer
def test_compiles_without_a_break(name):
    mixer = build(name)
    torch.compiler.reset()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    x, weight = example_input(2, 133).requires_grad_(), example_input(2, 133, seed=1)
    actual = output_and_gradients(mixer, compiled(x)[0], x, weight)
    for what, expected in output_and_gradients(mixer, mixer(x)[0], x, weight).items():
        assert_near(actual[what], expected, TOLERANCE[torch.float32], what)


@every_mixer
def test_reads_bfloat16_under_autocast(name):
    mixer, x = build(name), example_input(2, 133)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer(x)
    assert_near(y, mixer(x)[0], TOLERANCE[torch.bfloat16])


@every_mixer
def test_states_its_own_flops(name):
    mixer = build(name)
    assert "mixing_flops" in vars(type(mixer)), "a formula that is inherited is another mixer's"
    assert isinstance(mixer.mixing_flops(64), int)
    assert 0 < mixer.mixing_flops(64) < mixer.mixing_flops(128)


@every_mixer
def test_yaml_lists_every_option_at_its_default(name):
    mixer_class, options = read(name)
    parameters = inspect.signature(mixer_class).parameters
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    defaults = {key: value.default for key, value in parameters.items() if key not in FROM_MODEL}
    assert options == defaults


@every_mixer
def test_names_parameters_without_weight_decay_that_exist(name):
    for module in build(name).modules():
        assert getattr(module, "no_weight_decay", frozenset()) <= dict(module.named_parameters(recurse=False)).keys()


@every_mixer
def test_refuses_an_unknown_backend(name):
    with pytest.raises(UserError, match=r"attn\.backend=wishful"):
        build(name, backend="wishful")
