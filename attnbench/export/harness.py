"""Model class for EleutherAI's lm-evaluation-harness."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import simple_parse_args_string  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from attnbench.data.batches import evaluation_batches
from attnbench.export.text import encode, extra_nats, first_context, split
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import device_name
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import computing, resolve_precision
from attnbench.model.loss import character_nats
from attnbench.model.sampling import FiniteSampling, continuation, not_finite
from attnbench.model.stored import check_finite, load_checkpoint, tokenizer_of
from attnbench.settings.check import check_options, check_value, unknown_setting
from attnbench.settings.errors import UserError
from attnbench.settings.schema import GenerationSettings, TrainSettings
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.prepare import check_code

BATCH_TOKENS = 2**16
"""Positions in a batch with batch_size=auto."""
MAX_WRITTEN = 256
RULES = {entry.name: entry.metadata for group in (TrainSettings, GenerationSettings) for entry in fields(group)}
"""Values that attnbench train and attnbench generate allow for their settings."""
WRITING: dict[str, dict[str, Any]] = {
    "until": {"kind": str | list[str]},
    "max_gen_toks": {"kind": int, **RULES["num_tokens"]},
    "do_sample": {"kind": bool},
    "temperature": {"kind": float, **RULES["temperature"]},
    "top_k": {"kind": int, **RULES["top_k"]},
}

# A child of the harness's logger, because it shows no others.
log = logging.getLogger("lm_eval.attnbench")


class Window(NamedTuple):
    """Tokens that the model reads at once; the last `num_scored` are scored."""

    request: int
    inputs_T: Tensor
    targets_T: Tensor
    num_scored: int


class AttnbenchLM(LM):
    """Model of a finished run, for `lm_eval --model attnbench --model_args run=FOLDER`.

    Args:
        run: folder of the run.
        checkpoint: final or best.
        window: largest number of positions read at once; None: as in training.
        prefix: text before a document and before a continuation without context; None: `text.first_context`.
        device: auto, cpu, cuda or cuda:N.
        precision, backend: as the settings `train.precision` and `attn.backend`.
        batch_size: windows at a time, or auto.
        max_batch_size: largest number of windows at a time with batch_size=auto.
        seed: of sampled text; request n (from 0) uses seed + n, as attnbench generate would.
    """

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        own = {name: value for name, value in (additional_config or {}).items() if value is not None}
        for name, value in arg_dict.items():
            if name in own:
                raise UserError(f"--model_args {name}={value}: is an argument of the harness; give --{name} {value}")
            if name in ("run", "prefix") and isinstance(value, (bool, int, float)):
                raise UserError(
                    f"--model_args {name}={value}: the harness reads it as a number; quote it to give a text: "
                    f"--model_args \"{name}='...'\""
                )
        check_options(cls, {**own, **arg_dict}, group="")
        return cls(**own, **arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def __init__(
        self,
        run: str,
        checkpoint: str = "final",
        window: int | None = None,
        prefix: str | None = None,
        device: str = "auto",
        precision: str = "auto",
        backend: str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_value("checkpoint", checkpoint, **RULES["checkpoint"])
        check_value("precision", precision, **RULES["precision"])
        check_value("window", window, kind=int, minimum=1)
        check_value("seed", seed, kind=int, **RULES["seed"])
        precision = resolve_precision(precision, resolve_device(device).type, "precision")
        folder = checkpoint_of(Path(run).absolute(), checkpoint)
        self.model, self.record = load_checkpoint(folder, device=device, precision=precision, backend=backend)
        check_code(Path(run).absolute(), self.record.mixers)
        check_finite(self.model, folder)
        self.tokenizer = tokenizer_of(self.record)
        self.window, self.seed = window or self.record.seq_len, seed
        if prefix == "":
            raise UserError("prefix=: must be at least one character: the model predicts from a context")
        self.prefix_T = encode(self.tokenizer, first_context(self.tokenizer) if prefix is None else prefix)
        self.batch_size = _batch_size(batch_size, max_batch_size, self.window)
        self._device = self.model.embedding.weight.device
        log.info(f"device={device}: {device_name(self._device)}, {self.record.precision}")

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log p in nats, is greedy) of each (context, continuation)."""
        windows = [window for index, request in enumerate(requests) for window in self._windows(index, *request.args)]
        # Longest first, so that batches need little padding after the ends.
        windows.sort(key=lambda window: -len(window.inputs_T))
        nats, is_greedy = [0.0] * len(requests), [True] * len(requests)
        with device_lock(self._device, shared=True):
            for start in tqdm(range(0, len(windows), self.batch_size), disable=disable_tqdm, desc="loglikelihood"):
                batch = windows[start : start + self.batch_size]
                for window, scored_T, greedy_T in zip(batch, *self._scores(batch), strict=True):
                    nats[window.request] += scored_T[-window.num_scored :].double().sum().item()
                    is_greedy[window.request] &= bool(greedy_T[-window.num_scored :].all())
        results = []
        for request, value, greedy in zip(requests, nats, is_greedy, strict=True):
            extra = extra_nats(self.tokenizer, request.args[1])
            results.append((-(value + extra), greedy and not extra))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def _windows(self, request: int, context: str, continuation: str) -> Iterator[Window]:
        """Yield the continuation after as much context as fits; longer continuations in pieces, each after the last
        token of the piece before."""
        before_T, scored_T = split(self.tokenizer, context, continuation)
        before_T = before_T if len(before_T) else self.prefix_T
        whole_T = torch.cat([before_T, scored_T])
        if 0 < len(scored_T) <= self.window:
            start = max(0, len(whole_T) - 1 - self.window)
            yield Window(request, whole_T[start:-1], whole_T[start + 1 :], len(scored_T))
        else:
            for start in range(len(before_T) - 1, len(whole_T) - 1, self.window):
                targets_T = whole_T[start + 1 : start + 1 + self.window]
                yield Window(request, whole_T[start : start + len(targets_T)], targets_T, len(targets_T))

    @torch.no_grad()
    def _scores(self, windows: Sequence[Window]) -> tuple[list[Tensor], list[Tensor]]:
        """Return, on the CPU, the nats of each window's targets and whether they are the most likely tokens."""
        lengths = [len(window.inputs_T) for window in windows]
        inputs_BT, targets_BT = (
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(self._device)
            for tokens in ([it.inputs_T for it in windows], [it.targets_T for it in windows])
        )
        with computing(self.record.precision, self._device):
            logits_BTC, _ = self.model(inputs_BT)
        if not logits_BTC.isfinite().all():
            raise not_finite(self.record.precision)
        log_p_BTC = logits_BTC.float().log_softmax(-1)
        nats_BT = -log_p_BTC.gather(-1, targets_BT[..., None])[..., 0]
        greedy_BT = log_p_BTC[..., : self.tokenizer.num_writable].argmax(-1) == targets_BT
        parts = ([x_T[:length] for x_T, length in zip(x.cpu(), lengths, strict=True)] for x in (nats_BT, greedy_BT))
        nats, greedy = parts
        return nats, greedy

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each document in nats, after the prefix, in consecutive windows as in the perplexity
        evaluation."""
        results = []
        with device_lock(self._device, shared=True):
            for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
                (document,) = request.args
                tokens_N = torch.cat([self.prefix_T, encode(self.tokenizer, document)]).to(self._device)
                batches = evaluation_batches(tokens_N, self.window, self.batch_size)
                nats_N = character_nats(self.model, batches, self.record.precision)[len(self.prefix_T) - 1 :]
                if not nats_N.isfinite().all():
                    raise not_finite(self.record.precision)
                results.append(-(nats_N.double().sum().item() + extra_nats(self.tokenizer, document)))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to its first stop string, greedy or, with do_sample, sampled.

        The last `window` tokens of the context are read; the text may be longer. Options are checked before anything is
        generated.
        """
        for request in requests:
            for name, value in request.args[1].items():
                if name not in WRITING:
                    raise UserError(f"gen_kwargs: {unknown_setting(f'{name}={value}', name, WRITING)}")
                check_value(f"gen_kwargs: {name}", value, **WRITING[name])
        results = []
        with device_lock(self._device, shared=True):
            for index, request in enumerate(tqdm(requests, disable=disable_tqdm, desc="generate_until")):
                results.append(self._written(*request.args, seed=self.seed + index))
                self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    @torch.no_grad()
    def _written(self, context: str, options: Mapping[str, Any], seed: int) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        given = options.get("max_gen_toks")
        num_tokens = MAX_WRITTEN if given is None else given
        context_T = (encode(self.tokenizer, context) if context else self.prefix_T)[-self.window :].to(self._device)
        sampling = FiniteSampling(
            batch_size=1,
            num_characters=self.tokenizer.num_writable,
            temperature=_temperature(options),
            top_k=options.get("top_k"),
            seed=seed,
            device=self._device,
        )
        written, token_ids = "", []
        with computing(self.record.precision, self._device):
            tokens = continuation(self.model, context_T[None], num_tokens, sampling, self.record.precision)
            for token_B in sampling.checked(tokens, self.record.precision):
                # All of them are decoded again: a token may be a part of a character.
                token_ids += token_B.tolist()
                written = self.tokenizer.decode(token_ids)
                ends = [at for at in (written.find(stop) for stop in stops if stop) if at >= 0]
                if ends:
                    return written[: min(ends)]
        return written


def _batch_size(given: int | str, most: int | None, window: int) -> int:
    """The harness gives a number, a number as text, auto or auto:N."""
    check_value("max_batch_size", most, kind=int, minimum=1)
    if isinstance(given, str) and given.startswith("auto"):
        return max(1, min(BATCH_TOKENS // window, most or BATCH_TOKENS))
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(number, str):
        raise UserError(f"batch_size={given}: must be a whole number or auto")
    check_value("batch_size", number, kind=int, minimum=1)
    return number


def _temperature(options: Mapping[str, Any]) -> float:
    """0 is greedy. As in the harness, a temperature implies sampling unless `do_sample` is given."""
    given, is_sampled = options.get("temperature"), options.get("do_sample")
    if is_sampled is None:
        is_sampled = given is not None
    return 0.0 if not is_sampled else 1.0 if given is None else float(given)
