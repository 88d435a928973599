from pathlib import Path

from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.training.log import stream_metrics

MIN_STEPS = 100
"""Fewest steps for a speed; the first steps are slower (allocations, caches, clocks)."""


def speed_row(path: Path, num_steps: int, tokens_per_step: int) -> Measurement:
    """Return the row of a training's tokens per second, or one with the reason why there is none.

    Uses the intervals of metrics.jsonl in the last half of the steps, without validations, checkpoints, pauses and a
    process's first step.
    """
    missing = {"metric": "tokens_per_second", "value": None, "unit": "token/s", "status": "not_reached"}
    if num_steps < MIN_STEPS:
        return Measurement(**missing, reason=f"{num_steps} steps, and a training has a speed from {MIN_STEPS} on")
    steps, seconds, began = 0, 0.0, 0
    try:
        for row in stream_metrics(path) if path.exists() else ():
            if row.get("split") is not None:
                continue
            speed, length = row.get("tokens_per_second"), row["step"] - began
            if 2 * began >= num_steps and length > 0 and isinstance(speed, int | float) and speed > 0:
                steps, seconds = steps + length, seconds + length * tokens_per_step / speed
            began = row["step"]
    except UserError as error:
        return Measurement(**missing, reason=str(error))
    if not steps:
        return Measurement(**missing, reason=f"{path.name} has no interval in the last half of the {num_steps} steps")
    num_tokens = steps * tokens_per_step
    value = num_tokens / seconds
    return Measurement(metric="tokens_per_second", value=value, unit="token/s", num_samples=num_tokens)
