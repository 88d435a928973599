"""Model class for EleutherAI's lm-evaluation-harness: log-likelihoods and greedy text of a run's model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from attnbench.data.batches import evaluation_batches
from attnbench.export.text import encode, extra_nats, first_context, split
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import computing, dtype_of
from attnbench.model.loss import character_nats
from attnbench.model.sampling import Sampling, Writer, check_states
from attnbench.model.stored import load_checkpoint, tokenizer_of
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.prepare import check_code

BATCH_TOKENS = 2**16
"""Positions of a batch with batch_size=auto."""
MAX_WRITTEN = 256
"""Tokens that a request writes at most, unless it says max_gen_toks."""
WRITING = ("until", "max_gen_toks", "do_sample", "temperature", "top_k")
"""Options of generate_until."""


class Window(NamedTuple):
    """Tokens that the model reads at once, of which the last are scored."""

    request: int
    inputs_T: Tensor
    targets_T: Tensor
    num_scored: int


class AttnbenchLM(LM):
    """Model of a finished run, for `lm_eval --model attnbench --model_args run=FOLDER`.

    Args:
        run: folder of the run.
        checkpoint: final, or best: that of the lowest validation loss.
        window: most positions that the model reads at once; None: as many as it was trained on.
        prefix: text before the first character of a document and before a continuation without context; None: that of
            `text.first_context`.
        device, precision, backend: as the settings `device`, `train.precision` and `attn.backend`.
        batch_size: windows at a time, or auto.
        seed: of sampled text.

    Raises:
        UserError: there is no such run, it cannot run here, or an argument that is not allowed.
    """

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
        check_value("checkpoint", checkpoint, choices=("final", "best"))
        check_value("window", window, kind=int | None, minimum=1)
        folder = checkpoint_of(Path(run).absolute(), checkpoint)
        self.model, self.record = load_checkpoint(folder, device=device, precision=precision, backend=backend)
        check_code(Path(run).absolute(), self.record.mixers)
        self.tokenizer = tokenizer_of(self.record)
        self.window, self.seed = window or self.record.seq_len, seed
        if prefix == "":
            raise UserError("prefix=: must be at least one character: the model predicts what follows something")
        self.prefix_T = encode(self.tokenizer, first_context(self.tokenizer) if prefix is None else prefix)
        is_auto = str(batch_size).startswith("auto")
        self.batch_size = max(1, BATCH_TOKENS // self.window) if is_auto else int(batch_size)
        check_value("batch_size", self.batch_size, minimum=1)
        self._device = self.model.embedding.weight.device

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, of each (context, continuation), log p of the continuation in nats, and whether each of its tokens is
        the most likely one."""
        windows = [window for index, request in enumerate(requests) for window in self._windows(index, *request.args)]
        # Of one length as nearly as may be: what is shorter is padded behind its end, where nothing is scored.
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
        """Yield what is read for a continuation: all of it at once, behind as much of its context as fits; of one
        longer than the window pieces, one after the other, each behind the last token of the one before."""
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
        """Return the nats of each window's targets, and whether each is the most likely token, on the CPU."""
        lengths = [len(window.inputs_T) for window in windows]
        inputs_BT, targets_BT = (
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(self._device)
            for tokens in ([it.inputs_T for it in windows], [it.targets_T for it in windows])
        )
        with computing(self.record.precision, self._device):
            logits_BTC, _ = self.model(inputs_BT)
        log_p_BTC = logits_BTC.float().log_softmax(-1)
        nats_BT = -log_p_BTC.gather(-1, targets_BT[..., None])[..., 0]
        greedy_BT = log_p_BTC[..., : self.tokenizer.num_writable].argmax(-1) == targets_BT
        parts = ([x_T[:length] for x_T, length in zip(x.cpu(), lengths, strict=True)] for x in (nats_BT, greedy_BT))
        nats, greedy = parts
        return nats, greedy

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each document in nats, in the windows of the perplexity evaluation, one after the other, over
        the prefix and the document."""
        results = []
        with device_lock(self._device, shared=True):
            for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
                (document,) = request.args
                tokens_N = torch.cat([self.prefix_T, encode(self.tokenizer, document)]).to(self._device)
                batches = evaluation_batches(tokens_N, self.window, self.batch_size)
                nats_N = character_nats(self.model, batches, self.record.precision)[len(self.prefix_T) - 1 :]
                results.append(-(nats_N.double().sum().item() + extra_nats(self.tokenizer, document)))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first of its stop strings, the most likely token each
        time or, with do_sample, sampled.

        Of the context the last `window` tokens are read; what is written may go on beyond the window.
        """
        results = []
        check_states(self.model)
        with device_lock(self._device, shared=True):
            for request in tqdm(requests, disable=disable_tqdm, desc="generate_until"):
                results.append(self._written(*request.args))
                self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    @torch.no_grad()
    def _written(self, context: str, options: dict[str, Any]) -> str:
        unknown = sorted(set(options) - set(WRITING))
        if unknown:
            raise UserError(f"gen_kwargs: {unknown[0]}: unknown; there is {', '.join(WRITING)}")
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        num_tokens = int(options.get("max_gen_toks") or MAX_WRITTEN)
        context_T = (encode(self.tokenizer, context) if context else self.prefix_T)[-self.window :].to(self._device)
        sampling = Sampling(
            batch_size=1,
            num_characters=self.tokenizer.num_writable,
            temperature=_temperature(options),
            top_k=options.get("top_k"),
            seed=self.seed,
            device=self._device,
        )
        writer = Writer(
            self.model,
            sampling,
            batch_size=1,
            max_length=len(context_T) + num_tokens,
            dtype=dtype_of(self.record.precision),
            captured=False,
        )
        written, token_ids = "", []
        with computing(self.record.precision, self._device):
            for token_B in writer.write(context_T[None], num_tokens):
                # Anew from all of them: a token may be a part of a character.
                token_ids += token_B.tolist()
                written = self.tokenizer.decode(token_ids)
                ends = [at for at in (written.find(stop) for stop in stops if stop) if at >= 0]
                if ends:
                    return written[: min(ends)]
        return written


def _temperature(options: dict[str, Any]) -> float:
    """0, which is greedy, where nothing is sampled; a sample's own may be 0 too."""
    given = options.get("temperature")
    return 0.0 if not options.get("do_sample") else 1.0 if given is None else float(given)
