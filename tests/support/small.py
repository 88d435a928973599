"""Small models, corpora and states for the tests."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbench.bench.base import Bench
from attnbench.cli.compose import CONF, compose
from attnbench.data.batches import Batches
from attnbench.machine.processes import Outcome
from attnbench.model.building import build_model, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.model.stored import ModelRecord
from attnbench.results.rows import Identity
from attnbench.settings.registry import resolve
from attnbench.settings.schema import (
    ComparisonSettings,
    LoggerSettings,
    MixerSettings,
    ModelSettings,
    PlanSettings,
    RunSettings,
    TrainSettings,
)
from attnbench.training.checkpoint import TrainState
from attnbench.training.step import Batch

MIXERS = sorted(path.stem for path in (CONF / "attn").glob("*.yaml") if ": ???" not in path.read_text(encoding="utf-8"))
"""Yamls of conf/attn that need no further setting."""
CONTROLS = ("base_conv", "lstm", "mamba")
"""Mixers without the options of the parts around a mixing."""
WITH_PARTS = [name for name in MIXERS if name not in CONTROLS]
OPERATORS = ("fox", "gated_deltanet", "kda", "linear", "mlstm", "simple_gla", "softmax")
"""One mixer for each mixing operator of ops/."""
PROFILED = sorted(yaml.safe_load((CONF / "bench" / "profile.yaml").read_text(encoding="utf-8"))["mixers"])
"""Mixers of conf/bench/profile.yaml."""
BENCHES = sorted(path.stem for path in (CONF / "bench").glob("*.yaml"))
MODEL = ModelSettings(name="small", dim=32, num_layers=2, head_width=16, feed_forward_width=24)
TRAIN = TrainSettings(num_steps=12, batch_size=4, learning_rate=1e-2, warmup_steps=3, precision="float32")
TINY_RUN = [
    *("model.num_layers=2", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24"),
    *("match=none", "data=text"),
    *("train.num_epochs=null", "train.num_steps=2", "train.batch_size=2", "train.warmup_steps=1", "seq_len=16"),
]
"""Words of a language model that trains in a second on the text of data.path."""
PATHS = ("outputs_dir=", "data.path=")
VOCABULARY = [*"abcdefgh\n", "\N{REPLACEMENT CHARACTER}"]
SEQ_LEN = 16


def one_an_operator(names: Sequence[str] = MIXERS) -> list[Any]:
    """Return names as parameters of a test of code that mixers share: all but OPERATORS are marked slow."""
    return [name if name in OPERATORS else pytest.param(name, marks=pytest.mark.slow) for name in names]


class WeightReads(TorchDispatchMode):
    """Collect the names of operators that read a weight matrix of a model itself, not a copy of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.weights = {id(tensor) for name, tensor in model.named_parameters() if f".{name}".endswith(".weight")}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # A view of a parameter, such as its transpose, is the parameter itself.
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = [x if x._base is None else x._base for x in tensors]
        if any(id(x) in self.weights and x.dim() > 1 for x in given):
            self.operators.add(str(function))
        return function(*args, **(kwargs or {}))


def python_path(*folders: Path) -> dict[str, str]:
    """Return the environment of a child process with these folders first on its path."""
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])}


def compose_once(words: Sequence[str], config_dir: Path | None = None) -> RunSettings:
    """Compose a command line, and keep what Hydra made of it: Hydra takes as long as training a small model.

    The folders of outputs and text are set afterwards, so that they do not enter the cache.
    """
    paths = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith(PATHS)}
    named = [f"{name}=somewhere" for name in paths]
    settings = deepcopy(_composed((*named, *(word for word in words if not word.startswith(PATHS))), config_dir))
    settings.outputs_dir = paths.get("outputs_dir", settings.outputs_dir)
    settings.data.path = paths.get("data.path", settings.data.path)
    return settings


@cache
def _composed(words: tuple[str, ...], config_dir: Path | None) -> RunSettings:
    return compose(words, config_dir=config_dir)


def in_this_process(function: Callable[[Any], object], items: Iterable[Any], **_: object) -> Iterator[Outcome]:
    """Stand in for `run_in_processes`, whose workers each import everything."""
    waiting = items if isinstance(items, deque) else deque(items)
    while waiting:
        item, error = waiting.popleft(), None
        try:
            function(item)
        except Exception as failure:
            error = str(failure)
        yield Outcome(item=item, seconds=1.0, error=error)


def identity_of(**changed: Any) -> Identity:
    of_softmax = Identity(
        experiment="demo",
        run="softmax-tiny-T256-seed0-1a2b3c4d",
        mixer="softmax",
        variant="softmax",
        backend="sdpa",
        model="tiny",
        parameters=734_976,
        seq_len=256,
        evaluation="perplexity",
        seed=0,
        precision="float32",
        device="cpu",
        num_devices=1,
        environment="e0",
        commit="abc",
        corpus="wikitext2-v1",
        config_hash="1a2b3c4d",
    )
    return replace(of_softmax, **changed)


def little_plan(overrides: Sequence[str], **changed: Any) -> PlanSettings:
    """Return a plan of softmax and linear attention in copy, of two seeds and one search seed."""
    given = {
        "name": "little",
        "overrides": [*overrides],
        "variants": {"softmax": ["attn=softmax"], "plain": ["attn=linear"]},
        "evaluations": ["copy"],
        "seeds": [0, 1],
        "probe_seeds": [0, 1],
        "learning_rates": [4e-3],
        "num_search_seeds": 1,
    }
    return PlanSettings(**{**given, **changed})


def comparison_settings(plan: PlanSettings, outputs: Path, **changed: Any) -> ComparisonSettings:
    """Return settings of a comparison without a report and without imported cells."""
    settings = ComparisonSettings(
        plan=plan,
        logger=LoggerSettings(mode="none"),
        outputs_dir=str(outputs),
        device="cpu",
        rerun=False,
        report=False,
        exported=None,
        imported=None,
        command="",
    )
    return replace(settings, **changed)


def bench_class(name: str) -> type[Bench]:
    """The class that a yaml of conf/bench names."""
    return resolve(yaml.safe_load((CONF / "bench" / f"{name}.yaml").read_text(encoding="utf-8"))["_target_"], Bench)


def bench_words(name: str) -> list[str]:
    """The smoke settings of a bench, as a command line has them."""
    return [f"bench.{option}={json.dumps(value)}" for option, value in bench_class(name).smoke.items()]


def from_yaml(name: str, **options: object) -> MixerSettings:
    """Read a yaml of conf/attn with changed options, as a command does: auto stays auto."""
    content = yaml.safe_load((CONF / "attn" / f"{name}.yaml").read_text(encoding="utf-8"))
    target = content.pop("_target_")
    return MixerSettings(name=name, target=target, options={**content, **options})


def mixer_settings(name: str, **options: object) -> MixerSettings:
    """Return the same settings, resolved for a CPU."""
    return resolve_mixer(from_yaml(name, **options), MODEL, device_type="cpu", precision="float32")


def small_model(name: str = "softmax", seed: int = 0, **options: object) -> LanguageModel:
    return build_model([mixer_settings(name, **options)] * 2, MODEL, vocabulary_size=len(VOCABULARY), seed=seed)


def record(name: str = "softmax", **options: object) -> ModelRecord:
    return ModelRecord(
        mixers=[mixer_settings(name, **options)] * 2,
        model=MODEL,
        vocabulary=VOCABULARY,
        vocabulary_size=len(VOCABULARY),
        corpus="small@0123456789ab",
        seq_len=SEQ_LEN,
        precision="float32",
    )


def fresh_state(name: str = "softmax", seed: int = 0) -> TrainState:
    return TrainState.fresh(small_model(name, seed))


def rewrite_checkpoint(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and its checksum, so that the checkpoint looks intact."""
    (folder / name).write_bytes(content)
    state = json.loads((folder / "state.json").read_text())
    state["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))


def numbers_of(state: TrainState) -> dict[str, Tensor]:
    kinds = {"weight": dict(state.model.named_parameters()), "count": state.update_count}
    kinds |= {"first": state.first_moment, "second": state.second_moment}
    return {f"{kind}/{name}": x.detach().clone() for kind, tensors in kinds.items() for name, x in tensors.items()}


def assert_equal_numbers(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def batch_of(step: int) -> Batch:
    """Return the batch of a step, of a text that a model can learn from."""
    tokens_N = torch.arange(600).remainder(7).mul(3).remainder(9).to(torch.int16)
    return Batch(*Batches(tokens_N, SEQ_LEN, TRAIN.batch_size, 0, "cpu").train_batch(step))


def run_small(folder: Path) -> list[str]:
    """Return words that, behind a command of train.py, make it take a second."""
    return [*TINY_RUN, f"data.path={folder / 'my_text.txt'}", f"outputs_dir={folder}", "logger=none", "device=cpu"]


def watch_compiler(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Any, Any], Any] | None = None, *, fullgraph: bool = True
) -> list[Any]:
    """Make torch.compile only trace functions; return the list that collects their graphs.

    Args:
        run: makes a graph and its inputs a function; None is aot_eager, which traces the backward pass too.
    """
    # This import loads the compiler.
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph: Any, inputs: Any, *, options: Any = None) -> Any:
        # The options are inductor's own.
        graphs.append(graph)
        return (run or aot_eager)(graph, inputs)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=fullgraph))
    return graphs
