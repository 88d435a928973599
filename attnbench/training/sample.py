import json
from pathlib import Path

import torch
from torch import Tensor

from attnbench.machine.precision import computing
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import Sampling, continuation
from attnbench.model.stored import ModelRecord, tokenizer_of
from attnbench.results.files import replace_file

SAMPLE = "sample.json"

NUM_PROMPT, NUM_CHARACTERS, TEMPERATURE, SEED = 64, 300, 0.8, 0


def write_sample(folder: Path, model: LanguageModel, record: ModelRecord, tokens_N: Tensor) -> None:
    """Write the model's continuation of the first tokens of a text, for the report: comparable for models of one
    tokenizer. Leave the model in evaluation mode.

    {"prompt": "...", "text": "...", "temperature": 0.8, "seed": 0}
    """
    device, tokenizer = model.embedding.weight.device, tokenizer_of(record)
    prompt_BT = tokens_N[:NUM_PROMPT].long()[None].to(device)
    sampling = Sampling(
        batch_size=1, num_characters=tokenizer.num_writable, temperature=TEMPERATURE, seed=SEED, device=device
    )
    model.eval()
    with torch.no_grad(), computing(record.precision, device):
        tokens = continuation(model, prompt_BT, NUM_CHARACTERS, sampling, record.precision)
        text = tokenizer.decode(torch.cat(list(tokens)).tolist())
    content = {
        "prompt": tokenizer.decode(prompt_BT[0].tolist()),
        "text": text,
        "temperature": TEMPERATURE,
        "seed": SEED,
    }
    replace_file(folder / SAMPLE, json.dumps(content) + "\n")
