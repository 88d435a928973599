"""Text that a trained language model leaves beside it."""

import json

import pytest
import torch
from small import VOCABULARY, fresh_state, one_an_operator, record

from attnbench.training import sample as samples
from attnbench.training.sample import NUM_PROMPT, SAMPLE, write_sample


def written(folder, model) -> dict:
    tokens_N = torch.arange(3 * NUM_PROMPT, dtype=torch.uint8) % (len(VOCABULARY) - 1)
    folder.mkdir(exist_ok=True)
    write_sample(folder, model, record(), tokens_N)
    return json.loads((folder / SAMPLE).read_text())


@pytest.mark.parametrize("name", one_an_operator())
def test_a_sample_goes_on_from_the_text_with_known_characters_alike_each_time(name, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "NUM_CHARACTERS", 50)
    model = fresh_state(name).model
    sample = written(tmp_path / "first", model)
    assert sample["prompt"] == ("".join(VOCABULARY[:-1]) * NUM_PROMPT)[:NUM_PROMPT]
    assert len(sample["text"]) == 50
    assert set(sample["text"]) <= set(VOCABULARY[:-1])
    assert len(set(sample["text"])) > 1
    assert written(tmp_path / "again", model) == sample


def test_a_kernel_without_a_state_writes_by_recomputation(tmp_path, monkeypatch):
    model = fresh_state("softmax").model
    sample = written(tmp_path, model)
    mixer = model.layers[0].mixer
    monkeypatch.setattr(type(mixer), "trains_only", frozenset({mixer.backend}))
    monkeypatch.setattr("attnbench.model.sampling.Writer", None)
    assert written(tmp_path, model)["text"][:20] == sample["text"][:20]
