"""What only a GPU can tell: every backend against the definition in float64, compiled against not compiled."""

import pytest
import torch
from mixer_building import mixer_names, read
from small import TRAIN, VOCABULARY, batch_of, mixer_settings

from attnbench.checkpoint import TrainState
from attnbench.errors import UserError
from attnbench.model import build_model, init_weights
from attnbench.settings import ModelSettings
from attnbench.train import train

pytestmark = pytest.mark.gpu
BACKENDS = [(name, backend) for name in mixer_names() for backend in read(name)[0].backends]


def built(name, backend, dtype):
    mixer_class, options = read(name)
    mixer = mixer_class(dim=128, head_width=64, **{**options, "backend": backend})
    init_weights(mixer, 0, 2)
    return mixer.to("cuda", dtype)


def near(actual, expected, tolerance):
    error, scale = (actual.double() - expected.double()).norm(), expected.double().norm()
    # A single position has no decay to learn: nothing may differ from nothing.
    assert error <= tolerance * scale, f"{float(error):.2e} of {float(scale):.2e}"


@pytest.mark.parametrize("length", [1, 63, 64, 65, 133])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_is_the_definition_in_outputs_gradients_and_pieces(name, backend, length):
    mixer_class, options = read(name)
    try:
        mixer_class.choose_backend(
            {**options, "backend": backend, "head_width": 64}, device_type="cuda", precision="bfloat16"
        )
    except UserError as refusal:
        pytest.skip(str(refusal))
    reference, mixer = built(name, mixer_class.backends[0], torch.float64), built(name, backend, torch.bfloat16)
    torch.manual_seed(0)
    x_BTD = torch.randn(2, length, 128, device="cuda", dtype=torch.float64, requires_grad=True)
    half_BTD = x_BTD.detach().bfloat16().requires_grad_()
    expected, actual = reference.reference(x_BTD), mixer(half_BTD)[0]
    weight = torch.randn_like(expected)
    expected.backward(weight)
    actual.backward(weight.bfloat16())
    near(actual, expected, 0.03)
    assert x_BTD.grad is not None
    near(half_BTD.grad, x_BTD.grad, 0.03)
    for (label, own), other in zip(mixer.named_parameters(), reference.parameters(), strict=True):
        assert other.grad is not None, label
        near(own.grad, other.grad, 0.08)
    with torch.no_grad():
        state = mixer.init_state(2, 160, torch.bfloat16)
        cut, last = length // 2, max(length - 2, length // 2)
        pieces = []
        for start, stop in ((0, cut), (cut, last)):
            if stop > start:
                piece_BTD, state = mixer(half_BTD[:, start:stop], state)
                pieces.append(piece_BTD)
        for position in range(last, length):
            y_BD, state = mixer.step(half_BTD[:, position], state)
            pieces.append(y_BD[:, None])
    near(torch.cat(pieces, dim=1), actual, 0.02)


@pytest.mark.parametrize("name", mixer_names())
def test_what_was_trained_compiled_is_the_same_model_not_compiled(name):
    """After training, not before: a feature that loses its digits in one of the two shows only then."""
    settings = ModelSettings(name="small", dim=128, num_layers=2, head_width=64, feed_forward_width=128)
    model = build_model([mixer_settings(name)] * 2, settings, vocabulary_size=len(VOCABULARY), seed=0, device="cuda")
    state = TrainState.fresh(model)

    def batch(step):
        return type(batch_of(step))(*(x.cuda() if x is not None else None for x in batch_of(step)))

    train(state, batch, TRAIN, precision="bfloat16", num_steps=60, hooks=[], compiled=True, captured=True)
    tokens_BT = batch(0).tokens_BT
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        compiled, _ = torch.compile(model)(tokens_BT)
        eager, _ = model(tokens_BT)
    near(compiled, eager, 0.03)


@pytest.mark.parametrize("name", [name for name in mixer_names() if name != "flash"])
def test_a_captured_step_trains_like_the_others(name):
    def trained(captured):
        settings = ModelSettings(name="small", dim=64, num_layers=2, head_width=32, feed_forward_width=64)
        model = build_model([mixer_settings(name)] * 2, settings, vocabulary_size=len(VOCABULARY), seed=0)
        state = TrainState.fresh(model.cuda())
        losses = []

        def batch(step):
            return type(batch_of(step))(*(x.cuda() if x is not None else None for x in batch_of(step)))

        train(
            state,
            batch,
            TRAIN,
            precision="float32",
            num_steps=12,
            hooks=[lambda state, report: losses.append(float(report.loss))],
            captured=captured,
        )
        return losses, dict(state.model.named_parameters())

    (losses, parameters), (expected_losses, expected) = trained(True), trained(False)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert len(set(losses)) == len(losses)
    for label, parameter in parameters.items():
        near(parameter, expected[label], 1e-3)
