"""Text from the model of a run: attnbench generate, and `sample` for programs."""

import logging
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnbench.data.pieces import BYTE_ORDER_MARK
from attnbench.data.tokenizer import Tokenizer
from attnbench.machine.environment import device_name
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import computing
from attnbench.machine.signals import answering
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import FiniteSampling, continuation
from attnbench.model.stored import ModelRecord, load_checkpoint, tokenizer_of
from attnbench.settings.check import check, check_argument
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable_text
from attnbench.settings.hybrid import backends_of, parts_of
from attnbench.settings.paths import user_path
from attnbench.settings.schema import GenerationSettings, RunSettings
from attnbench.settings.untrusted import read_bounded
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.prepare import check_code

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 2**24


def write_text(settings: GenerationSettings, trained: RunSettings) -> Path:
    """Continue a prompt on standard output; return the run's folder. `trained` has the run's settings, with the device
    to use."""
    folder = Path(settings.run).absolute()
    model, record = load_checkpoint(
        checkpoint_of(folder, settings.checkpoint),
        device=trained.device,
        precision=trained.train.precision,
        backend={name: part.options.get("backend", "auto") for name, part in parts_of(trained.mixer).items()},
    )
    check_code(folder, record.mixers)
    prompt = read_prompt(settings)
    started = time.perf_counter()
    with _continued(settings, model, record, prompt) as tokens:
        tokenizer = tokenizer_of(record)
        num_written = _show(prompt, tokens, tokenizer, settings.num_samples)
    log.info(
        f"{trained.mixer.name} ({backends_of(record.mixers)}), {record.precision}, "
        f"{device_name(_device_of(model))}: "
        f"{settings.num_samples} × {num_written} {tokenizer.units} in {time.perf_counter() - started:.2f} s"
    )
    return folder


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
    """Return the text that follows a prompt.

    Model and record come from `load_checkpoint`; the others are settings of attnbench generate.
    """
    pair = "as load_checkpoint returns it: model, record = load_checkpoint(FOLDER)"
    check_argument("model", model, LanguageModel, pair)
    check_argument("record", record, ModelRecord, pair)
    check_argument("prompt", prompt, str, "a text")
    device = str(_device_of(model))
    settings = GenerationSettings(
        **{"run": "", "checkpoint": "final", "prompt": prompt, "prompt_file": None, "num_samples": 1},
        **{"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k, "seed": seed},
        **{"backend": None, "device": device},
    )
    check(settings)
    with _continued(settings, model, record, read_prompt(settings)) as tokens:
        return tokenizer_of(record).decode(torch.cat(list(tokens)).tolist())


def _device_of(model: LanguageModel) -> torch.device:
    return model.embedding.weight.device


@contextmanager
def _continued(
    settings: GenerationSettings, model: LanguageModel, record: ModelRecord, prompt: str
) -> Iterator[Iterator[Tensor]]:
    """Yield an iterator over the tokens after a prompt; the device computes in the record's precision inside."""
    device = _device_of(model)
    tokens_T = encode_prompt(prompt, tokenizer_of(record)).to(device)
    with ExitStack() as stack:
        stack.enter_context(device_lock(device, shared=True))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(computing(record.precision, device))
        yield _tokens(settings, model, record, tokens_T)


def read_prompt(settings: GenerationSettings) -> str:
    """Return `prompt`, or the content of `prompt_file` or standard input without byte order mark and last line end."""
    if settings.prompt is not None:
        name, text = "prompt", settings.prompt
    else:
        name = "standard input" if settings.prompt_file is None else f"prompt_file={settings.prompt_file}"
        try:
            if settings.prompt_file is not None:
                text = read_bounded(user_path(settings.prompt_file), MAX_PROMPT_BYTES)
            else:
                text = _read_standard_input()
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: not valid UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8"
            ) from None
        text = text.removeprefix(BYTE_ORDER_MARK).removesuffix("\n")
    if not text:
        raise UserError(f"{name}: is empty, and the model continues at least one character")
    return text


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        log.info("prompt= and prompt_file= are null: type the prompt, then Ctrl-D")
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise UserError(f"standard input: longer than the {MAX_PROMPT_BYTES} bytes that a prompt may have")
    return content.decode()


def encode_prompt(text: str, tokenizer: Tokenizer) -> Tensor:
    """Return (T,) int64 on the CPU."""
    tokenizer.check_known(text)
    return torch.from_numpy(tokenizer.encode(text).astype(np.int64))


def _tokens(
    settings: GenerationSettings, model: LanguageModel, record: ModelRecord, tokens_T: Tensor
) -> Iterator[Tensor]:
    if model.backend_without_state:
        log.info("a layer has no decoding state: each token is computed from the whole text again, which takes longer")
    prompt_BT, device = tokens_T.expand(settings.num_samples, -1), tokens_T.device
    sampling = FiniteSampling(
        batch_size=settings.num_samples,
        num_characters=tokenizer_of(record).num_writable,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=settings.seed,
        device=device,
    )
    tokens = continuation(
        model, prompt_BT, settings.num_tokens, sampling, record.precision, captured=device.type == "cuda"
    )
    return sampling.checked(tokens, record.precision)


def _show(prompt: str, tokens: Iterator[Tensor], tokenizer: Tokenizer, num_samples: int) -> int:
    """Print one text as it is written, or several at the end; return the number of tokens of each."""
    count = 0
    # A token may be part of a character.
    decoder = getincrementaldecoder("utf-8")("replace")
    with answering() as output:
        if num_samples == 1:
            print(printable_text(prompt), end="", flush=True, file=output)
            for token_B in tokens:
                count += 1
                text = decoder.decode(tokenizer.to_bytes(token_B.tolist()))
                print(printable_text(text), end="", flush=True, file=output)
            print(printable_text(decoder.decode(b"", final=True)), file=output)
        else:
            written_BT = torch.stack(list(tokens), dim=1)
            count = written_BT.shape[1]
            for index, token_T in enumerate(written_BT, start=1):
                print(f"--- {index} of {num_samples}", file=output)
                print(printable_text(prompt + tokenizer.decode(token_T.tolist())), file=output)
    return count
