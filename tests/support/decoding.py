"""A small model and prompts, for the tests of decoding."""

import torch
from small import VOCABULARY, mixer_settings

from attnbench.model.building import build_model
from attnbench.model.language_model import LanguageModel
from attnbench.settings.schema import ModelSettings

MODEL = ModelSettings(name="small", dim=64, num_layers=2, head_width=32, feed_forward_width=64)


def small_model(name: str, device: str = "cpu") -> LanguageModel:
    mixers = [mixer_settings(name)] * 2
    model = build_model(mixers, MODEL, vocabulary_size=len(VOCABULARY), seed=0, device=device)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            # With initial weights, and an embedding that is also the output, a token's next one is itself.
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def prompt(length: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(len(VOCABULARY), (3, length), generator=generator).to(device)
