"""Text that a trained language model writes, kept beside it, so that a report shows some without loading a model."""

import json
from pathlib import Path

import torch
from torch import Tensor

from attnbench.machine.precision import computing, dtype_of
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import Sampling, Writer, write_by_recomputation
from attnbench.model.stored import ModelRecord, tokenizer_of
from attnbench.results.files import replace_file

SAMPLE = "sample.json"
"""Name of the file in a training's folder."""

NUM_PROMPT, NUM_CHARACTERS, TEMPERATURE, SEED = 64, 300, 0.8, 0


def write_sample(folder: Path, model: LanguageModel, record: ModelRecord, tokens_N: Tensor) -> None:
    """Write what the model continues the first tokens of a text with: alike for all models of one tokenizer.

    {"prompt": "...", "text": "...", "temperature": 0.8, "seed": 0}

    Args:
        model: left in the mode of evaluation.
        tokens_N: of the text.
    """
    device, tokenizer = model.embedding.weight.device, tokenizer_of(record)
    prompt_BT = tokens_N[:NUM_PROMPT].long()[None].to(device)
    sampling = Sampling(
        batch_size=1, num_characters=tokenizer.num_writable, temperature=TEMPERATURE, seed=SEED, device=device
    )
    model.eval()
    with torch.no_grad(), computing(record.precision, device):
        if model.backend_without_state:
            tokens = write_by_recomputation(model, prompt_BT, NUM_CHARACTERS, sampling)
        else:
            length, dtype = prompt_BT.shape[1] + NUM_CHARACTERS, dtype_of(record.precision)
            writer = Writer(model, sampling, batch_size=1, max_length=length, dtype=dtype, captured=False)
            tokens = writer.write(prompt_BT, NUM_CHARACTERS)
        text = tokenizer.decode(torch.cat(list(tokens)).tolist())
    content = {
        "prompt": tokenizer.decode(prompt_BT[0].tolist()),
        "text": text,
        "temperature": TEMPERATURE,
        "seed": SEED,
    }
    replace_file(folder / SAMPLE, json.dumps(content) + "\n")
