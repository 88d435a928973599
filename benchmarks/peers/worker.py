"""An implementation in a process of its own, which the parent asks in lines of JSON over pipes.

{"ask": "build", "order": ...} -> {"parameters": ..., "first_step_seconds": ...}, then "time", "losses" and "memory". An
error is an answer too: {"status": ..., "reason": ...}. The end of its input ends the process and its children at once.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread, Timer
from typing import Any

from attnbench.machine.processes import cause_of_death
from attnbench.results.folder import ROOT
from attnbench.settings.errors import UserError
from attnbench.settings.text import unlinked_log
from benchmarks.peers.models import AbsentPeerError

LIMIT_SECONDS = 1800.0
"""Longest wait for an answer: compilers of some peers take minutes."""

ABSENT = "absent"
"""Status of a peer that is not on this machine; every other is one of a result row."""


class WorkerError(Exception):
    """A question without an answer; `status` is that of a result row, or ABSENT."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Worker:
    """The parent's end.

    Args:
        log: gets what the process prints.
        caches: folder of what compilers keep; an empty one for a cold start.
        paths: put first on its PYTHONPATH.
        variables: of its environment.
        limit_seconds: longest wait for an answer; then the process and its children are ended.
    """

    def __init__(
        self,
        log: Path,
        caches: Path,
        *,
        paths: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.limit_seconds = limit_seconds
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), *([inherited] if inherited else [])]),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            **(variables or {}),
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        with unlinked_log(log).open("a", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                # It leads a group, so that what it starts ends with it.
                process_group=0,
            )

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """The answer.

        Raises:
            WorkerError: there is none, it took too long, or the process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = Timer(self.limit_seconds, self._kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            is_late = not limit.is_alive()
            limit.cancel()
        if is_late:
            raise WorkerError(
                "failed", f"no answer to {question} within {self.limit_seconds:g} s; --limit waits longer"
            )
        if not line.endswith("\n"):
            raise WorkerError("failed", cause_of_death(self._process.wait()))
        answer = json.loads(line)
        if "status" in answer:
            raise WorkerError(answer["status"], answer["reason"])
        return answer

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # It may be at a step that takes minutes, and Ctrl-C on the terminal does not reach it.
            self._kill()
        for pipe in (self._process.stdin, self._process.stdout):
            # What is left in the buffer of a pipe to a process that died cannot be written.
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()


class Session:
    """The child's end: the step that it has built, and the number of times that it was taken."""

    def __init__(self) -> None:
        self.num_steps = 0

    def build(self, order: dict[str, Any]) -> dict[str, Any]:
        """Build, and take the first step.

        Everything that training imports is imported when the clock starts; `start_seconds` then counts the corpus, the
        model and the step, `first_step_seconds` the step alone.
        """
        from attnbench.cli.compose import compose
        from attnbench.kernels import import_kernels
        from attnbench.machine.device import resolve_device, synchronize
        from attnbench.machine.environment import environment
        from attnbench.training.prepare import corpus_label
        from benchmarks.peers import steps

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
        from attnbench.machine.device import synchronize

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
        from attnbench.machine.device import peak_memory_mib

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

    from attnbench.machine.device import has_triton

    torch._dynamo.list_backends()
    init_backend_registration()
    if has_triton():
        import_module("triton.compiler.code_generator")


def _answer(session: Session, request: dict[str, Any]) -> dict[str, Any]:
    from attnbench.machine.timing import OutOfMemory, attempt

    function = getattr(session, request.pop("ask"))
    try:
        answer = attempt(partial(function, **request))
    except AbsentPeerError as error:
        return {"status": ABSENT, "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        reason = first_line if isinstance(error, UserError) else f"{type(error).__name__}: {first_line}"
        return {"status": "failed", "reason": reason}
    if isinstance(answer, OutOfMemory):
        return {"status": "out_of_memory", "reason": answer.reason}
    return answer


def _end_with_input() -> None:
    """Wait until the parent has closed its end, or has died; nothing here is worth saving."""
    poll = select.poll()
    # For no event but the hang-up, which is always reported: what there is to read is the main thread's.
    poll.register(sys.stdin, 0)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Answer until the input ends."""
    # Standard output is for answers: what libraries print there goes where errors go.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    Thread(target=_end_with_input, daemon=True).start()
    session = Session()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(session, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
