"""Prefill and decoding: what is timed is what it says, and a captured step decodes as the others do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import prompt, small_model
from runs import SETTINGS
from small import MIXERS, WeightReads, mixer_settings, one_an_operator

from attnbench.cli.compose import compose
from attnbench.evals import inference
from attnbench.evals.inference import DECODE, PREFILL, Inference, time_decoding
from attnbench.evals.lib.rows import STATE
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.memory import available_mib
from attnbench.machine.precision import computing
from attnbench.machine.timing import Times
from attnbench.mixers.base import Mixer
from attnbench.mixers.linear import LinearAttention
from attnbench.model.sampling import decoder
from attnbench.settings.registry import resolve
from attnbench.training.job import Run
from attnbench.training.prepare import prepare

SETTINGS_OF_TWO = {**Inference.smoke, "lengths": [16, 48], "batch_sizes": [1, 3]}


def subject(text: Path, *overrides: str) -> Run:
    return prepare(compose([*SETTINGS, f"data.path={text}", *overrides]))


@pytest.mark.parametrize("name", one_an_operator())
def test_every_setting_has_its_rows(text, name):
    rows: Any = list(Inference(**SETTINGS_OF_TWO).run(subject(text, f"attn={name}", "match=none")))
    assert [(row.metric, *row.settings.values()) for row in rows] == [
        *((STATE, length, 1) for length in (16, 48)),
        *((metric, length, size) for size in (1, 3) for length in (16, 48) for metric in (PREFILL, DECODE)),
    ]
    assert all(row.status == "ok" and row.value for row in rows)
    for row in rows[2:]:
        assert row.low <= row.value <= row.high
        assert row.num_samples == 3
        assert ("sequence_length" in row.settings) == (row.metric == PREFILL)
    grows = rows[1].value > rows[0].value
    assert grows == resolve(mixer_settings(name).target, Mixer).state_grows


def test_the_speeds_are_tokens_over_time(text, monkeypatch):
    monkeypatch.setattr(Timed, "times", lambda *_: Times(2.0, 1.0, 4.0, 3))
    rows = list(Inference(**SETTINGS_OF_TWO).run(subject(text)))
    speeds = {(row.metric, *row.settings.values()): (row.value, row.low, row.high) for row in rows[2:]}
    assert speeds[PREFILL, 48, 3] == (48 * 3 / 2e-3, 48 * 3 / 4e-3, 48 * 3 / 1e-3)
    assert speeds[DECODE, 48, 3] == (3 / 2e-3, 3 / 4e-3, 3 / 1e-3)


@pytest.mark.parametrize("length", [pytest.param(5, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("name", one_an_operator())
def test_what_is_decoded_follows_the_prompt(name, length, monkeypatch):
    """Each step is timed behind the whole prompt, which is read in pieces, and what was decoded since."""
    model, tokens_BT, seen = small_model(name), prompt(length), []

    def observe(model, token_B, state, *, captured):
        decode = decoder(model, token_B, state, captured=captured)
        return lambda: seen.append((token_B.clone(), decode()))

    monkeypatch.setattr(inference, "decoder", observe)
    repetition = Timed(warmup=1, repeats=3, max_seconds=1.0)
    with torch.no_grad():
        time_decoding(model, tokens_BT, torch.float32, repetition)
        taken_BT = torch.stack([token_B for token_B, _ in seen], dim=1)
        # The prompt's last token is the first that is decoded from, once more.
        expected, _ = model(torch.cat([tokens_BT, taken_BT], dim=1))
    assert torch.equal(taken_BT[:, 0], tokens_BT[:, -1])
    logits = torch.stack([logits_BC for _, logits_BC in seen], dim=1)
    torch.testing.assert_close(logits, expected[:, length:], rtol=1e-3, atol=1e-4)
    assert torch.equal(logits.argmax(-1)[:, :-1], taken_BT[:, 1:])
    assert len(taken_BT.unique()) > 1
    assert len(seen) == CapturedCall.NUM_WARMUP + 1 + 1 + 3


@pytest.mark.parametrize("name", MIXERS)
def test_steps_in_bfloat16_find_their_weights_cast(name):
    model = small_model(name)
    with torch.no_grad(), computing("bfloat16", torch.device("cpu")):
        decode = decoder(model, prompt(1)[:, 0], model.init_state(3, 8, torch.bfloat16), captured=False)
        decode()
        with WeightReads(model) as reads:
            decode()
    # Rows of the embedding, and, of a convolution on a CPU, its few taps. Two mixers cut their weights at each step:
    # mla folds up-projections into query and output, and of rwkv7 each map reads a mixture of its own.
    cut = {"aten.split_with_sizes.default"} if name == "rwkv7" else set()
    assert reads.operators <= {"aten.embedding.default", "aten._to_copy.default", *cut}
    convolves = any("convolution" in parameter for parameter, _ in model.named_parameters())
    assert convolves or name in ("mla", "rwkv7") or "aten._to_copy.default" not in reads.operators


def test_a_text_too_short_is_rows_that_say_so(text):
    rows = list(Inference(**{**SETTINGS_OF_TWO, "lengths": [16, 2**16], "batch_sizes": [1]}).run(subject(text)))
    assert [row.status for row in rows] == ["ok"] * 4 + ["unsupported"] * 2
    assert all("characters and a batch needs 65537" in row.reason for row in rows[4:])


def test_a_backend_that_only_trains_is_rows_that_say_so(text, monkeypatch):
    monkeypatch.setattr(LinearAttention, "trains_only", frozenset({"torch"}))
    measured = subject(text, "attn=linear")
    rows = list(Inference(**SETTINGS_OF_TWO).run(measured))
    assert len(rows) == 10
    assert all(row.status == "unsupported" and "torch only trains" in row.reason for row in rows)


@pytest.mark.skipif(available_mib() is None, reason="only Linux counts and caps a process's memory")
def test_a_prefill_that_does_not_fit_decodes_all_the_same(text, monkeypatch):
    # The weights of two heads are 8 x 2 x 2048 x 2048 numbers, 256 MiB; by pieces of 256 an eighth.
    monkeypatch.setattr(inference, "available_mib", lambda: 250.0)
    rows = list(Inference(**{**SETTINGS_OF_TWO, "lengths": [16, 2048], "batch_sizes": [8]}).run(subject(text)))
    statuses = {(row.metric, *row.settings.values()): row.status for row in rows}
    assert statuses[PREFILL, 16, 8] == statuses[DECODE, 16, 8] == "ok"
    assert statuses[PREFILL, 2048, 8] == "out_of_memory"
    assert statuses[DECODE, 2048, 8] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_captured_step_decodes_as_the_others_do(name, precision):
    device, dtype = torch.device("cuda", 0), torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, tokens_BT = small_model(name, "cuda"), prompt(70, "cuda")

    def decoded(captured):
        state = model.init_state(3, 100, dtype)
        for piece_BT in tokens_BT[:, :-1].split(1, dim=1):
            # Step by step: flash's prefill is for bfloat16 alone.
            _, state = model.step(piece_BT[:, 0], state)
        decode = decoder(model, tokens_BT[:, -1].clone(), state, captured=captured)
        return torch.stack([decode().clone() for _ in range(20)])

    with torch.no_grad(), computing(precision, device):
        eager, captured = decoded(False), decoded(True)
    assert not torch.equal(eager[0], eager[-1])
    assert torch.equal(captured.argmax(-1), eager.argmax(-1))
    torch.testing.assert_close(captured, eager)


@pytest.mark.gpu
def test_a_captured_call_takes_its_inputs_and_changes_what_lies_elsewhere_once_a_call():
    total = torch.zeros(4, device="cuda")

    def add(given):
        total.add_(given)
        return 2 * total

    call, expected = CapturedCall(add), 0.0
    for number in range(CapturedCall.NUM_WARMUP + 5):
        expected += number
        doubled = call(torch.full((4,), float(number), device="cuda"))
        assert total.tolist() == [expected] * 4
        assert doubled.tolist() == [2 * expected] * 4
    with pytest.raises(ValueError, match="one shape"):
        call(torch.zeros(5, device="cuda"))
