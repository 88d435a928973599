"""Ranks other than 0: they compute their share of each step and write nothing."""

import traceback
from dataclasses import replace

from attnbench.machine.group import Group, LostError
from attnbench.machine.ranks import speak
from attnbench.machine.signals import StopRequest
from attnbench.settings.errors import Interrupted, UserError, mendable
from attnbench.settings.escape import printable
from attnbench.settings.schema import RunSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.job import Run, batches_of
from attnbench.training.lead import Word, shared_tensors
from attnbench.training.loop import train
from attnbench.training.prepare import prepare
from attnbench.training.run import make_ready
from attnbench.training.step import StepReport


def follow(group: Group, settings: RunSettings) -> None:
    """Take part in every training of one job of rank 0. Raises Interrupted if rank 0 has ended the command, LostError
    if another process has ended."""
    try:
        if group.backend == "nccl":
            settings = replace(settings, device=f"cuda:{group.rank}")
        while True:
            word, _, payload = group.agree(0, 0, 0)
            if word == Word.QUIT:
                raise Interrupted("rank 0 has ended the command", 0)
            if word == Word.DONE:
                return
            _take_part(group, settings, f"{payload:08x}")
    except Exception as error:
        group.is_lost = True
        text = mendable(error)
        # Other errors than a user's mistake need their traceback.
        text = printable(f"error: {text}") if text is not None else traceback.format_exc()
        speak(f"process {group.rank} of {group.size}: {text}")
        raise


def _take_part(group: Group, settings: RunSettings, config_hash: str) -> None:
    stop = StopRequest(announced=False)
    with stop.listening():
        try:
            run = prepare(settings)
            if run.config_hash != config_hash:
                raise UserError(
                    f"trains {run.config_hash}, and rank 0 {config_hash}: the corpus, the code or the devices differ"
                )
            make_ready(run.device)
            _train(run, group, stop)
        except LostError:
            if stop.signal is None or stop.saves:
                raise
            # The signal also ended rank 0, which has nothing to save yet.
            raise stop.interruption("stopped") from None


def _train(run: Run, group: Group, stop: StopRequest) -> None:
    state = TrainState.fresh(run.new_model())
    _, _, state.step = group.agree(0, 0, 0)
    group.share(shared_tensors(state))

    def goes_on(state: TrainState) -> bool:
        word, _, last_step = group.agree(0, stop.signal or 0, 0)
        state.last_step = last_step or None
        return word == Word.STEP

    def stepped(state: TrainState, report: StepReport) -> None:
        # From now on rank 0 stops this process, after it has saved.
        stop.saves = True

    train(
        state,
        batches_of(run, group),
        run.train,
        precision=run.precision,
        num_steps=run.num_steps,
        hooks=[stepped],
        compiled=run.compile,
        captured=run.captured,
        group=group,
        goes_on=goes_on,
    )
