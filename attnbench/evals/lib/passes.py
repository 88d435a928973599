"""Memory of a pass: on a GPU by its allocator, on a CPU by the resident set of a child process."""

from collections.abc import Callable

import torch

from attnbench.machine.device import start_afresh
from attnbench.machine.memory import reset_resident_peak, resident_peak_mib, return_freed_memory
from attnbench.machine.precision import computing
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.dropout import row_keys
from attnbench.model.language_model import LanguageModel
from attnbench.training.step import Batch, loss_and_gradients

METRICS = {"forward": "forward_peak_mib", "training": "training_peak_mib"}
"""The metric of each mode: a forward pass without gradient, or forward and backward of the loss."""

Weigh = Callable[[str, int], float | OutOfMemory | None]
"""Peak MiB of a pass in a mode at a length; None if the system does not tell."""


def _pass(model: LanguageModel, mode: str, length: int, batch_size: int, precision: str) -> Callable[[], object]:
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, batch_size, length)
    tokens_BT, targets_BT = torch.randint(
        model.embedding.num_embeddings, shape, device=device, generator=generator
    ).unbind()
    keys_B = row_keys(0, 0, torch.arange(batch_size, device=device)) if model.dropout else None

    def forward() -> None:
        with torch.no_grad(), computing(precision, device):
            model(tokens_BT)

    def training() -> None:
        loss_and_gradients(model, Batch(tokens_BT, targets_BT, dropout_B=keys_B), None, precision)

    return forward if mode == "forward" else training


def weigh_on_device(
    builder: Callable[[], LanguageModel],
    batch_size: int,
    precision: str,
    device: torch.device,
    mode: str,
    length: int,
) -> float | OutOfMemory:
    def weigh() -> float:
        start_afresh(device)
        # A new model each time: a backward pass that did not fit leaves gradients on the old one.
        run = _pass(builder(), mode, length, batch_size, precision)
        # First calls tune and allocate cuBLAS's workspace, which are no part of a pass.
        run()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20

    return attempt(weigh)


def resident_weigher(builder: Callable[[], LanguageModel], batch_size: int, precision: str) -> Weigh:
    return_freed_memory()
    model = builder()

    def weigh(mode: str, length: int) -> float | None:
        run = _pass(model, mode, length, batch_size, precision)
        before_mib = reset_resident_peak()
        run()
        return None if before_mib is None else resident_peak_mib() - before_mib

    for mode in METRICS:
        # Threads and libraries loaded on first use are no part of a pass.
        _pass(model, mode, 16, batch_size, precision)()
    return weigh
