"""What only a GPU can tell: every backend against the definition in float64, compiled against not compiled."""

import json
import subprocess
import sys

import pytest
import torch
from kernel_checks import assert_near
from mixer_building import read
from safetensors.torch import load_file
from small import MIXERS, TRAIN, VOCABULARY, batch_of, mixer_settings, python_path
from train_twice import WAYS

from attnbench.bench.base import Conditions
from attnbench.bench.operators.attention import AttentionPasses, Problem, example_of
from attnbench.bench.operators.gate import GateError, largest_error
from attnbench.bench.operators.roofline import Ceilings
from attnbench.correctness.checks import build_mixer
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.device import forget_compiled, share_kernel_cache
from attnbench.machine.precision import multiplying
from attnbench.mixers.definition import LENGTHS, MODEL, TOLERANCES, deviation
from attnbench.model.building import build_model, resolve_mixer
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import train

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
BACKENDS = [(name, backend) for name in MIXERS for backend in read(name)[0].backends]


def built(name, backend, precision="bfloat16"):
    settings = mixer_settings(name)
    settings.options["backend"] = backend
    try:
        resolve_mixer(settings, MODEL, device_type="cuda", precision=precision)
    except UserError as refusal:
        pytest.skip(str(refusal))
    return build_mixer(settings, DEVICE)


@pytest.mark.parametrize("length", [*LENGTHS, 64])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_is_the_definition_in_outputs_and_gradients(name, backend, precision, length):
    if (backend, precision) == ("fla", "float32"):
        pytest.skip("it multiplies in TF32, whatever torch's setting is")
    mixer = built(name, backend, precision)
    held = deviation(mixer, length, precision)
    assert held.is_within(TOLERANCES[precision]), held


@pytest.mark.parametrize("length", [*LENGTHS, 64])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_pieces_and_steps_are_the_whole(name, backend, length):
    mixer = built(name, backend)
    if backend in mixer.trains_only:
        pytest.skip("only trains")
    mixer = mixer.bfloat16()
    x_BTD = torch.randn(2, length, MODEL.dim, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        state = mixer.init_state(2, length + 3, torch.bfloat16)
        cut, last = length // 2, max(length - 2, length // 2)
        pieces = []
        for start, stop in ((0, cut), (cut, last)):
            if stop > start:
                piece_BTD, state = mixer(x_BTD[:, start:stop], state)
                pieces.append(piece_BTD)
        for position in range(last, length):
            y_BD, state = mixer.step(x_BTD[:, position], state)
            pieces.append(y_BD[:, None])
        assert_near(torch.cat(pieces, dim=1), mixer(x_BTD)[0], 0.02)


@pytest.mark.parametrize("name", MIXERS)
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
    assert_near(compiled, eager, 0.03)


@pytest.mark.parametrize("name", MIXERS)
def test_a_captured_step_trains_like_the_others(name):
    def trained(captured):
        settings = ModelSettings(name="small", dim=64, num_layers=2, head_width=32, feed_forward_width=64)
        # On a GPU `auto` may be a kernel that only a GPU has.
        backend = read(name)[0].choose_backend({}, device_type="cuda", precision="float32")
        mixers = [mixer_settings(name)] * 2
        for mixer in mixers:
            mixer.options["backend"] = backend
        model = build_model(mixers, settings, vocabulary_size=len(VOCABULARY), seed=0)
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
        assert_near(parameter, expected[label], 1e-3)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_width", [16, 64, 128])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_implementation_of_operator_tables_passes_the_gate(name, head_width, precision):
    implementation = IMPLEMENTATIONS[name]
    refusal = implementation.refusal("cuda", precision, head_width)
    if refusal is not None:
        pytest.skip(refusal)
    try:
        function = implementation.make()
    except UserError as missing:
        pytest.skip(str(missing))
    subject = Conditions(device=DEVICE, precision=precision, ceilings=Ceilings(1, 1), mixers=lambda names: [])
    for causal in (False, True)[: 1 + implementation.causal]:
        # The compiler makes eight graphs of one function and refuses a ninth; here are seven lengths.
        forget_compiled()
        # 8 and not 1: for a single key cuDNN has no kernel.
        for length in (8, 63, 64, 65, 130, 257, 1024):
            problem = Problem(
                batch_size=2,
                num_heads=3,
                sequence_length=length,
                head_width=head_width,
                causal=causal,
                with_gradients=implementation.gradient,
                repetition=Timed(warmup=1, repeats=1, max_seconds=1.0),
            )
            with multiplying(precision):
                example = example_of(problem, subject)
                passes = AttentionPasses(function, example, problem, implementation.heads_first)
                try:
                    largest_error(passes.results(example.heads), example.expected, precision)
                except GateError as wrong:
                    pytest.fail(f"{length} positions, causal={causal}: {wrong}")


@pytest.fixture(scope="module")
def twice(root, tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    # In a cache of their own the second finds the sizes that the compiler measured for the first; in one that others
    # fill at the same time it may find theirs. Our kernels, which measure nothing, stay where they are.
    share_kernel_cache()
    environment = python_path(root) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    for folder in folders:
        command = [sys.executable, root / "tests" / "support" / "train_twice.py", "cuda", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_two_processes_train_the_same_model_to_the_bit(name, way, twice):
    one, two = (load_file(folder / f"{name}-{way}.safetensors") for folder in twice)
    losses = [json.loads((folder / f"{name}-{way}.json").read_text()) for folder in twice]
    assert one.keys() == two.keys()
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
    assert losses[0] == losses[1]
