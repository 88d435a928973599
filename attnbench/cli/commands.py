"""What generate.py does: a run's model opened for this device, a prompt read, and text written as it comes."""

import logging
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from attnbench.data.vocabulary import decode, encode
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import device_name
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import computing, dtype_of, resolve_precision
from attnbench.machine.signals import lose, raising
from attnbench.model.language_model import LanguageModel, resolve_mixer
from attnbench.model.sampling import Sampling, Writer, write_by_recomputation
from attnbench.settings.check import check
from attnbench.settings.errors import UserError, printable
from attnbench.settings.registry import trust
from attnbench.settings.schema import GenerationSettings, RunSettings
from attnbench.settings.text import printable_text, read_bounded
from attnbench.training.checkpoint import ModelRecord, best_folder, is_final, load_model, load_record

log = logging.getLogger(__name__)

MOST_PROMPT_BYTES = 2**24
MOST_NAMED = 10
"""Characters of a prompt that a message names."""


def write_text(settings: GenerationSettings, trained: RunSettings) -> Path:
    """Writes to standard output what the model of a run makes of a prompt; returns the run's folder.

    Args:
        trained: what the run's config.yaml says, with the device to use.

    Raises:
        UserError: no finished training is there, a prompt that cannot be read or has characters that the model does not
            know, or a backend that only trains.
    """
    folder = Path(settings.run).absolute()
    model, record = load_checkpoint(
        _checkpoint(folder, settings.checkpoint),
        device=trained.device,
        precision=trained.train.precision,
        backend=trained.mixer.options.get("backend", "auto"),
    )
    if not settings.recompute:
        _check_states(model)
    prompt = read_prompt(settings)
    started = time.perf_counter()
    with _continued(settings, model, record, prompt) as tokens:
        num_written = _show(prompt, tokens, record.vocabulary, settings.num_samples)
    log.info(
        f"{trained.mixer.name} ({record.mixers[0].options['backend']}), {record.precision}, "
        f"{device_name(_device_of(model))}: "
        f"{settings.num_samples} × {num_written} characters in {time.perf_counter() - started:.2f} s"
    )
    return folder


def load_checkpoint(
    folder: Path | str,
    *,
    device: str = "auto",
    precision: str = "auto",
    backend: str = "auto",
    trusted: Collection[str] = (),
) -> tuple[LanguageModel, ModelRecord]:
    """A trained model, ready to compute on this device, and its record, which names the kernels and the precision that
    are used here.

    Args:
        folder: a run's checkpoint/final or checkpoint/best-<step>.
        device, precision, backend: as the settings `device`, `train.precision` and `attn.backend`.
        trusted: classes outside attnbench that may be built, beside those of a `compose([...], config_dir=...)`.

    Raises:
        UserError: there is no such checkpoint, it was altered, or it cannot run here.
    """
    trust(trusted)
    folder, place = Path(folder), resolve_device(device)
    record = load_record(folder)
    record.precision = resolve_precision(precision, place.type)
    record.mixers = [
        resolve_mixer(
            replace(own, options={**own.options, "backend": backend}),
            record.model,
            device_type=place.type,
            precision=record.precision,
        )
        for own in record.mixers
    ]
    model, _ = load_model(folder, device=place, mixers=record.mixers)
    return model.eval(), record


def sample(
    model: LanguageModel,
    record: ModelRecord,
    prompt: str,
    *,
    num_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """The text that follows a prompt; model and record as `load_checkpoint` gives them, the rest as generate.py's.

    Raises:
        UserError: a setting out of range, characters that the model does not know, or a backend that only trains.
    """
    device = str(_device_of(model))
    settings = GenerationSettings(
        **{"run": "", "checkpoint": "final", "prompt": prompt, "prompt_file": None, "num_samples": 1},
        **{"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k, "seed": seed},
        **{"recompute": False, "backend": None, "device": device},
    )
    check(settings)
    _check_states(model)
    with _continued(settings, model, record, read_prompt(settings)) as tokens:
        return decode(torch.cat(list(tokens)), tuple(record.vocabulary))


def _checkpoint(folder: Path, which: str) -> Path:
    """A run's checkpoint of this name.

    Raises:
        UserError: there is none.
    """
    checkpoints = folder / "checkpoint"
    if not is_final(checkpoints):
        raise UserError(f"run={folder}: has no finished training; the train.py command that made it goes on with it")
    return best_folder(checkpoints) if which == "best" else checkpoints / "final"


def _device_of(model: LanguageModel) -> torch.device:
    return model.embedding.weight.device


@contextmanager
def _continued(
    settings: GenerationSettings, model: LanguageModel, record: ModelRecord, prompt: str
) -> Iterator[Iterator[Tensor]]:
    """The tokens that follow a prompt, made as they are taken; inside, the device computes as the record says."""
    device = _device_of(model)
    tokens_T = encode_prompt(prompt, record.vocabulary).to(device)
    with ExitStack() as stack:
        stack.enter_context(device_lock(device, shared=True))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(computing(record.precision, device))
        yield _tokens(settings, model, record, tokens_T)


def read_prompt(settings: GenerationSettings) -> str:
    """The words of `prompt`, or the content of `prompt_file` or of standard input, less one line end at its end, which
    editors and echo add.

    Raises:
        UserError: it is empty, is no UTF-8, or cannot be read.
    """
    if settings.prompt is not None:
        name, text = "prompt", settings.prompt
    elif settings.prompt_file is not None:
        name = f"prompt_file={settings.prompt_file}"
        try:
            text = read_bounded(Path(settings.prompt_file).expanduser(), MOST_PROMPT_BYTES)
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise UserError(f"{name}: cannot be read ({error})") from None
        text = text.removesuffix("\n")
    else:
        name = "standard input"
        if sys.stdin.isatty():
            log.info("prompt= and prompt_file= are null: type the prompt, then Ctrl-D")
        try:
            content = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
            text = content.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: cannot be read ({error})") from None
        if len(content) > MOST_PROMPT_BYTES:
            raise UserError(f"{name}: longer than the {MOST_PROMPT_BYTES} bytes that a prompt may have")
    if not text:
        raise UserError(f"{name}: is empty, and the model continues at least one character")
    return text


def encode_prompt(text: str, vocabulary: Sequence[str]) -> Tensor:
    """Tokens (T,), int64 on the CPU.

    Raises:
        UserError: characters that are not in the vocabulary, by name.
    """
    known = set(vocabulary[:-1])
    strange = list(dict.fromkeys(character for character in text if character not in known))
    if strange:
        names = [f"{printable(c)} (U+{ord(c):04X})" for c in strange[:MOST_NAMED]]
        names += [f"{len(strange) - MOST_NAMED} more"] if len(strange) > MOST_NAMED else []
        raise UserError(f"the prompt has {', '.join(names)}: not among the {len(known)} characters of the run's corpus")
    return torch.from_numpy(encode(text, tuple(vocabulary))).long()


def _check_states(model: LanguageModel) -> None:
    for block in model.layers:
        backend = getattr(block.mixer, "backend", "")
        if backend in block.mixer.trains_only:
            raise UserError(f"backend={backend}: only trains, it takes no state; choose another, or recompute=true")


def _tokens(
    settings: GenerationSettings, model: LanguageModel, record: ModelRecord, tokens_T: Tensor
) -> Iterator[Tensor]:
    prompt_BT, device = tokens_T.expand(settings.num_samples, -1), tokens_T.device
    sampling = FiniteSampling(
        batch_size=settings.num_samples,
        # What is unknown, and what pads the embedding, is no character.
        num_characters=len(record.vocabulary) - 1,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=settings.seed,
        device=device,
    )
    if settings.recompute:
        return _finite(write_by_recomputation(model, prompt_BT, settings.num_tokens, sampling), sampling, record)
    writer = Writer(
        model,
        sampling,
        batch_size=settings.num_samples,
        max_length=len(tokens_T) + settings.num_tokens,
        dtype=dtype_of(record.precision),
        captured=device.type == "cuda",
    )
    return _finite(writer.write(prompt_BT, settings.num_tokens), sampling, record)


class FiniteSampling(Sampling):
    """Remembers whether all logits were finite: of others the most likely token says nothing."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.noise_BC.device)

    def choose(self, logits_BC: Tensor) -> Tensor:
        """The same as Sampling's; reads nothing from the device."""
        self.is_finite.logical_and_(logits_BC.isfinite().all())
        return super().choose(logits_BC)


def _finite(tokens: Iterator[Tensor], sampling: FiniteSampling, record: ModelRecord) -> Iterator[Tensor]:
    """The tokens, for as long as they mean something.

    Raises:
        UserError: logits were not finite.
    """
    # One text is shown as it is written, and waits for the device anyway; of several all are made first.
    is_shown = len(sampling.noise_BC) == 1
    for token_B in tokens:
        if is_shown:
            _check_finite(sampling, record)
        yield token_B
    _check_finite(sampling, record)


def _check_finite(sampling: FiniteSampling, record: ModelRecord) -> None:
    if not sampling.is_finite:
        raise UserError(
            f"the model's logits are not finite in {record.precision}: its weights are damaged, or too large for it"
        )


def _show(prompt: str, tokens: Iterator[Tensor], vocabulary: Sequence[str], num_samples: int) -> int:
    """One text as it is written, several one after another when all are; nothing that a terminal obeys.

    Returns:
        How many characters were made of each, fewer where nobody reads on.

    Raises:
        UserError: standard output cannot be written to.
    """
    made, output = Counted(tokens), raising(sys.stdout)
    try:
        _print(prompt, made, tuple(vocabulary), num_samples, output)
        output.flush()
    except OSError as error:
        lose(output)
        # Who reads a pipe may have seen enough.
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output: cannot be written to ({error.strerror})") from None
    return made.count


class Counted:
    """What it is given, and how many of it were taken."""

    def __init__(self, tokens: Iterator[Tensor]) -> None:
        self.tokens, self.count = tokens, 0

    def __iter__(self) -> Iterator[Tensor]:
        for token_B in self.tokens:
            self.count += 1
            yield token_B


def _print(prompt: str, tokens: Iterable[Tensor], names: tuple[str, ...], num_samples: int, output: TextIO) -> None:
    if num_samples == 1:
        print(printable_text(prompt), end="", flush=True, file=output)
        for token_B in tokens:
            print(printable_text(decode(token_B, names)), end="", flush=True, file=output)
        print(file=output)
        return
    written_BT = torch.stack(list(tokens), dim=1)
    for index, token_T in enumerate(written_BT, start=1):
        print(f"--- {index} of {num_samples}", file=output)
        print(printable_text(prompt + decode(token_T, names)), file=output)
