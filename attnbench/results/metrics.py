"""Metrics: their definitions, and the primary metric of an evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnbench.results.numbers import percent_of_nats
from attnbench.settings.errors import UserError

KINDS = ("nats", "accuracy", "level")

DEFINITIONS = {
    # Scores
    "accuracy": "share of the labels that are right, of test data",
    "symbol_accuracy": "share of the copied symbols that are right, each predicted from the right ones before it",
    "string_accuracy": "share of strings of which every symbol is right",
    "doublings": "sum of (accuracy - chance) / (1 - chance) over the levels of a ladder, each twice the one before",
    "largest_held": "largest level of a ladder whose accuracy, scaled so, is 0.9 or more",
    "pairs_recalled": "largest number of pairs times their accuracy, scaled so, over the levels",
    "pairs_per_kib": "pairs recalled for each KiB of the decoding state of one sequence",
    "macro_accuracy": "mean of the accuracies of all symbols that are asked for, each with the same weight",
    "mean_accuracy": "mean of the accuracies of all test cells, each with the same weight",
    "selection": "by which rates are chosen and trainings end",
    "solved": "share of seeds with a validation accuracy of 0.95 at two checks in a row, and as much on test data",
    "steps_to_95": "steps until the validation accuracy was 0.95 at two checks in a row, of the seeds that reached it",
    "samples_to_95": "training sequences until then",
    "rise_share": "share of the steps to a validation accuracy of 0.9 that came after 0.1",
    "steps_trained": "steps until the training ended",
    "nats_per_character": "sum of -log p of the next token, over the number of characters",
    "perplexity": "exp of the nats a token, over the whole split",
    "bits_per_character": "nats a character divided by log 2",
    "bits_per_byte": "bits a byte of UTF-8, comparable whatever the tokenizer; 8 for each byte it does not know",
    "token_share": "share of the tokens that are repeated ones, or others",
    "rate_window": "decades of learning rates in total that reach 90 % of the best score, gaps left out",
    "rate_sensitivity": "mean loss of score against the best one, over the rates within a decade of the chosen one",
    # Models
    "parameters": "trained weights of the model",
    "non_embedding_parameters": "trained weights without those of the embedding",
    "forward_flops_per_token": "arithmetic of a forward pass a position, a multiply-add counted as 2",
    "state_bytes": "bytes that a model keeps of one sequence while it decodes, after as many positions as it says",
    "published_bytes": "bytes of a state as arXiv 2402.18668 counts them in its figure 2",
    # Speed and memory
    "tokens_per_second": "positions a second",
    "generator_tokens_per_second": "positions a second that the task's data are made at",
    "train_seconds": "seconds in training steps, without those that the process was suspended for",
    "first_step_seconds": "seconds from the built model to the end of its first step: compilation and tuning",
    "step_milliseconds": "time of a training step, forward, backward, clip and optimizer; the median of several",
    "peak_memory_mib": "most memory that was held on the device, weights and optimizer among it",
    "forward_peak_mib": "most memory above the weights, forward without gradient",
    "training_peak_mib": "most memory above the weights, forward and backward",
    "growth_exponent": "b of memory ~ length ^ b, over the longer half of the lengths",
    "achieved_tflops": "arithmetic that the mixer's own formula counts, a second",
    "ceiling_fraction": "achieved TFLOP/s as a share of one large matrix product's, which each run times for itself",
    "prefill_tokens_per_second": "positions of a prompt a second",
    "decode_tokens_per_second": "tokens that are written a second, of all sequences",
    # Operators
    "forward_milliseconds": "time of a forward pass",
    "backward_milliseconds": "time of a backward pass",
    "total_milliseconds": "time of both passes",
    "decode_milliseconds": "time of one decoded position",
    "memory_before_backward_mib": "memory held between the passes",
    "speedup": "time of the table's reference divided by this one's",
    "roofline_fraction": "least time that arithmetic and memory traffic allow on this device, over the time taken",
    "max_error": "largest relative error of output and gradients against the definition",
    "part_share": "share of a step's time",
}
"""Definition of each metric, for a report."""

OF_TRAININGS = (
    "over the last half of a training's steps, from 100 steps on (rows of earlier versions: all but the first)"
)
"""Steps that a training's tokens_per_second is measured over."""

AXES = {
    "position_bucket": "positions 1, 2, 3 to 4, 5 to 8, ... of a window, each mark at the last of its bucket",
    "context": "full: every token is predicted from at least half a window",
    "chance": "score of guessing",
    "beyond_training": "longer than any sequence that was trained on",
    "training_lengths": "length of the strings over that of the longest trained on",
    "levels": "levels that the doublings are a sum over, their maximum",
    "slice": "repeated: tokens that complete an n-gram which their context has already; other: the rest",
    "budget": "most steps, or sequences, that a training takes",
}
"""Definition of each setting whose name does not explain it."""


def is_timed(metric: str, unit: str) -> bool:
    """Tell if a metric depends on time, and so on the load of the machine."""
    shares = ("achieved_tflops", "ceiling_fraction", "roofline_fraction", "speedup")
    return unit in ("s", "ms") or metric.endswith(("_per_second", "_seconds", "_milliseconds")) or metric in shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Primary:
    metric: str
    kind: str
    """nats: about normal over seeds, lower is better; accuracy: in 0..1; level: number of levels held, with parts of
    levels."""
    margin: float
    """Difference below which two scores are equivalent, in the metric's unit."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Only settings that contain these."""
    hardest: list[str] = field(default_factory=list)
    """Settings that order cells from easy to hard; "-width": smaller is harder."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.metric}: kind {self.kind!r} must be one of {', '.join(KINDS)}")
        if not 0 < self.margin < math.inf:
            raise UserError(f"{self.metric}: margin={self.margin} must be above 0 and finite")

    @property
    def margin_text(self) -> str:
        """The margin in words: "1 % of perplexity"."""
        if self.kind == "nats":
            return f"{percent_of_nats(self.margin):.3g} % of perplexity"
        return f"{self.margin:g} {self.scale}"

    @property
    def scale(self) -> str:
        """Words behind a difference: "in accuracy", "doublings"."""
        return self.metric if self.kind == "level" else f"in {self.kind}"

    @property
    def higher_is_better(self) -> bool:
        """False for nats alone."""
        return self.kind != "nats"

    def takes(self, metric: str, settings: Mapping[str, Any]) -> bool:
        return metric == self.metric and self.settings.items() <= settings.items()

    def hardness(self, settings: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(
            -settings[name[1:]] if name.startswith("-") else settings[name]
            for name in self.hardest
            if isinstance(settings.get(name.removeprefix("-")), int | float)
        )
