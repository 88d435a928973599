"""One process of those that must train the same models: every mixer, as a user trains it on the device and plainly.

python tests/support/train_twice.py DEVICE FOLDER
"""

import json
import sys
from pathlib import Path

from mixer_building import read
from safetensors.torch import save_file
from small import MIXERS, TRAIN, VOCABULARY, batch_of, mixer_settings

from attnbench.model.building import build_model
from attnbench.settings.schema import ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import train

NUM_STEPS = 30
SETTINGS = ModelSettings(name="small", dim=128, num_layers=2, head_width=64, feed_forward_width=128)
WAYS = {"compiled": "bfloat16", "plain": "float32"}
"""And the precision of each."""


def trained(name: str, way: str, device: str) -> tuple[TrainState, list[float]]:
    precision, is_compiled = WAYS[way], way == "compiled"
    mixers = [mixer_settings(name)] * SETTINGS.num_layers
    for mixer in mixers:
        mixer.options["backend"] = read(name)[0].choose_backend({}, device_type=device, precision=precision)
    state = TrainState.fresh(build_model(mixers, SETTINGS, vocabulary_size=len(VOCABULARY), seed=0, device=device))

    def batch(step: int):
        own = batch_of(step)
        return type(own)(*(part.to(device) if part is not None else None for part in own))

    losses: list[float] = []
    train(
        state,
        batch,
        TRAIN,
        precision=precision,
        num_steps=NUM_STEPS,
        hooks=[lambda state, report: losses.append(float(report.loss))],
        compiled=is_compiled,
        captured=is_compiled and device == "cuda",
    )
    return state, losses


def main() -> None:
    """Leaves <mixer>-<way>.safetensors and .json in the folder."""
    device, folder = sys.argv[1], Path(sys.argv[2])
    for name in MIXERS:
        for way in WAYS if device == "cuda" else ["plain"]:
            state, losses = trained(name, way, device)
            weights = {key: tensor.detach().cpu().contiguous() for key, tensor in state.model.named_parameters()}
            save_file(weights, folder / f"{name}-{way}.safetensors")
            (folder / f"{name}-{way}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
