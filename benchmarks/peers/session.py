"""The child's end of a worker: the step that it has built, and the number of times that it was taken."""

import time
import traceback
from functools import partial
from importlib import import_module
from typing import Any

from attnbench.cli.compose import compose
from attnbench.machine.device import has_triton, peak_memory_mib, resolve_device, synchronize
from attnbench.machine.environment import environment
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.ops.common.importing import import_kernels
from attnbench.results.folder import ROOT
from attnbench.settings.errors import UserError, one_line
from attnbench.training.job import corpus_label
from benchmarks.peers import steps
from benchmarks.peers.cases import ABSENT
from benchmarks.peers.models import AbsentPeerError


class Session:
    """Answers of one process, a method a question."""

    def __init__(self) -> None:
        self.num_steps = 0

    def answer(self, question: str, arguments: dict[str, Any]) -> tuple[str, Any]:
        """Return a status and the answer, or the reason why there is none."""
        try:
            answer = attempt(partial(getattr(self, question), **arguments))
        except AbsentPeerError as error:
            return ABSENT, str(error)
        except Exception as error:
            traceback.print_exc()
            return "failed", str(error).partition("\n")[0] if isinstance(error, UserError) else one_line(error)
        return ("out_of_memory", answer.reason) if isinstance(answer, OutOfMemory) else ("ok", answer)

    def build(self, order: dict[str, Any]) -> dict[str, Any]:
        """Build, and take the first step.

        Everything that training imports is imported when the clock starts; `start_seconds` then counts the corpus, the
        model and the step, `first_step_seconds` the step alone.
        """
        settings = compose(order["overrides"])
        self.device = resolve_device(settings.device)
        if order["kind"] == "ours" and self.device.type != "cpu":
            import_kernels()
        if self.device.type != "cpu" or settings.train.compile:
            _import_compiler()
        configured = time.perf_counter()
        self.built = steps.build(steps.Order(**order), settings)
        synchronize(self.device)
        started = time.perf_counter()
        loss = self._step()
        synchronize(self.device)
        ended = time.perf_counter()
        built = self.built._asdict()
        corpus = built.pop("corpus")
        del built["step"]
        return {
            **built,
            "corpus": None if corpus is None else corpus_label(corpus),
            "first_step_seconds": ended - started,
            "start_seconds": ended - configured,
            "loss": float(loss),
            "environment": environment(self.device, ROOT),
        }

    def time(self, num_steps: int) -> dict[str, Any]:
        """Milliseconds a step, over so many in a row, between which nothing waits for the device."""
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step()
        synchronize(self.device)
        return {"milliseconds": (time.perf_counter() - started) * 1e3 / num_steps}

    def losses(self, num_steps: int) -> dict[str, Any]:
        """The losses of the next steps."""
        return {"losses": [float(loss) for loss in [self._step().clone() for _ in range(num_steps)]]}

    def memory(self) -> dict[str, Any]:
        """MiB reserved on the device at most in the life of this process, CUDA-graph pools too; None on a CPU."""
        return {"peak_mib": peak_memory_mib(self.device)}

    def _step(self) -> Any:
        loss = self.built.step(self.num_steps)
        self.num_steps += 1
        return loss


def _import_compiler() -> None:
    """Import what torch.compile, and Triton with it, would otherwise import in the first step, a hundred modules."""
    import torch._dynamo
    import torch._inductor.compile_fx
    from torch._inductor.codegen.common import init_backend_registration

    torch._dynamo.list_backends()
    init_backend_registration()
    if has_triton():
        import_module("triton.compiler.code_generator")
