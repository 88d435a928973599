"""Time zoology's own training loop at its recall task, its code by path:

    benchmarks/zoology_loop.py PATH LENGTH PAIRS STEPS --cache FOLDER

Its attention model of two layers, 64 wide, a convolution of three taps in the first and one head in the second, as the
figures of its paper have it; STEPS batches an epoch of 256 sequences, of 8,192 symbols. Prints seconds as JSON: `data`
until its sequences are made or read, `fit` of two epochs with their validations, and `second_epoch` without. Sequences
are kept in `--cache`, so that a second run reads them.

It needs einops, pydantic, pandas, tqdm and a GPU. wandb, which it imports and does not use here, and torchvision's
StochasticDepth, of which it takes a rate of 0, are stood in for where they are not installed.
"""

import argparse
import json
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BATCH_SIZE, WIDTH, SYMBOLS, NUM_TEST = 256, 64, 8192, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="zoology's repository")
    parser.add_argument("length", type=int)
    parser.add_argument("pairs", type=int)
    parser.add_argument("steps", type=int, help="of an epoch")
    parser.add_argument("--cache", type=Path, required=True, help="folder of its sequences")
    given = parser.parse_args()
    started = time.perf_counter()
    sys.path.insert(0, str(given.path))
    stand_in()
    marks: dict[str, float] = {}
    train = timed_training(marks)
    train(configuration(given))
    ended = time.perf_counter()
    print(
        json.dumps(
            {
                "data": round(marks["fit"] - started, 2),
                "fit": round(ended - marks["fit"], 2),
                "second_epoch": round(marks["second_epoch"], 2),
            }
        )
    )


def stand_in() -> None:
    """Put modules in the place of those that zoology imports and has no use for here, where they are not installed."""
    from torch import Tensor, nn

    class StochasticDepth(nn.Module):
        def __init__(self, p: float, mode: str) -> None:
            super().__init__()
            assert p == 0, mode

        def forward(self, x: Tensor) -> Tensor:
            return x

    if find_spec("wandb") is None:
        sys.modules["wandb"] = types.ModuleType("wandb")
    if find_spec("torchvision") is None:
        torchvision, ops = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
        ops.StochasticDepth, torchvision.ops = StochasticDepth, ops  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules.update({"torchvision": torchvision, "torchvision.ops": ops})


def timed_training(marks: dict[str, float]) -> Any:
    """Return zoology's `train`, whose loop writes into `marks` when it begins and how long its second epoch takes."""
    from zoology import train as module  # pyright: ignore[reportMissingImports]

    fit, epoch = module.Trainer.fit, module.Trainer.train_epoch

    def timed_fit(self: Any) -> None:
        marks["fit"] = time.perf_counter()
        fit(self)

    def timed_epoch(self: Any, index: int) -> None:
        began = time.perf_counter()
        # It reads its loss at every step, so that nothing is left running.
        epoch(self, index)
        if index == 1:
            marks["second_epoch"] = time.perf_counter() - began

    module.Trainer.fit, module.Trainer.train_epoch = timed_fit, timed_epoch
    # In its newest versions a model returns embeddings unless told, and cross entropy is still of logits.
    defaults = module.LanguageModel.forward.__defaults__ or ()
    module.LanguageModel.forward.__defaults__ = tuple(False if value is True else value for value in defaults)
    return module.train


def configuration(given: argparse.Namespace) -> Any:
    """Return zoology's settings of two epochs."""
    from zoology.config import DataConfig, ModelConfig, ModuleConfig, TrainConfig  # pyright: ignore[reportMissingImports]
    from zoology.data.multiquery_ar import MQARConfig  # pyright: ignore[reportMissingImports]

    task = {"num_kv_pairs": given.pairs, "input_seq_len": given.length, "vocab_size": SYMBOLS}
    mixers = [
        {"name": "zoology.mixers.base_conv.BaseConv", "kwargs": {"l_max": given.length, "kernel_size": 3}},
        {"name": "zoology.mixers.attention.MHA", "kwargs": {"dropout": 0.1, "num_heads": 1}},
    ]
    given.cache.mkdir(parents=True, exist_ok=True)
    return TrainConfig(
        data=DataConfig(
            train_configs=[MQARConfig(num_examples=given.steps * BATCH_SIZE, **task)],
            test_configs=[MQARConfig(num_examples=NUM_TEST, **task)],
            batch_size=BATCH_SIZE,
            cache_dir=str(given.cache),
        ),
        model=ModelConfig(
            vocab_size=SYMBOLS,
            d_model=WIDTH,
            n_layers=len(mixers),
            max_position_embeddings=given.length,
            sequence_mixer=ModuleConfig(name="zoology.mixers.hybrid.Hybrid", kwargs={"configs": mixers}),
            state_mixer={"name": "torch.nn.Identity", "kwargs": {}},
        ),
        max_epochs=2,
        learning_rate=1e-3,
    )


if __name__ == "__main__":
    main()
