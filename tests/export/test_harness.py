"""lm-evaluation-harness on a run: likelihoods are those of our perplexity evaluation, texts those of generate.py."""

import json
import math
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
from small import TINY_RUN, compose_once, python_path

from attnbench import load_checkpoint, sample
from attnbench.comparison.execute import run
from attnbench.export.text import BYTE_NATS, encode
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.training.prepare import prepare

pytestmark = pytest.mark.skipif(not util.find_spec("lm_eval"), reason="lm-eval is not installed")

TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> tuple[Path, str]:
    """A run that was evaluated, and its test split."""
    folder = tmp_path_factory.mktemp("run")
    learnt = ["train.num_steps=12", "train.learning_rate=3e-2", "eval=perplexity", "eval.perplexity.extrapolation=[]"]
    words = ["attn=linear", *TINY_RUN, *learnt, f"data.path={text}", f"outputs_dir={folder}"]
    settings = compose_once([*words, "logger=none", "device=cpu"])
    corpus = prepare(settings).corpus
    return run(settings), corpus.decode(corpus.tokens["test"])


@pytest.fixture
def language_model(finished):
    from attnbench.export.harness import AttnbenchLM

    return lambda **how: AttnbenchLM(**{"run": str(finished[0]), "device": "cpu", **how})


def instances(kind: str, *arguments: tuple):
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return [Instance(request_type=kind, doc={}, arguments=it, idx=index) for index, it in enumerate(arguments)]


def log_p(lm, text: str) -> torch.Tensor:
    """log p of each token after the first, all of them read at once."""
    tokens_T = encode(lm.tokenizer, text)
    with torch.no_grad():
        logits_TC = lm.model(tokens_T[None, :-1])[0][0]
    return logits_TC.log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]


def test_bits_per_byte_of_a_local_document_are_those_of_our_evaluation(finished, language_model, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    folder, split = finished
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "document.jsonl").write_text(json.dumps({"text": split[1:]}) + "\n")
    (tmp_path / "words.yaml").write_text(TASK.replace("FILE", str(tmp_path / "document.jsonl")))
    # The first character of a split is nobody's prediction: here it is the context of the first that is.
    found = simple_evaluate(
        language_model(prefix=split[0], batch_size=32),
        tasks=["words"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    theirs = found["results"]["words"]["bits_per_byte,none"]
    wanted = {"split": "test", "checkpoint": "final"}
    (ours,) = [
        row.measurement.value
        for row in read_folders([folder])
        if row.measurement.metric == "bits_per_character" and wanted.items() <= row.measurement.settings.items()
        and "context" not in row.measurement.settings
    ]  # fmt: skip
    print(f"bits per byte: {theirs:.8f} of the harness, {ours:.8f} ours, {len(split) - 1} characters")
    assert theirs == pytest.approx(ours, abs=1e-4)
    assert ours > 0.5


def test_an_unknown_character_costs_the_unknown_symbol_and_its_bytes(language_model):
    lm = language_model()
    text, same_tokens = "cat \u00e9\N{GRINNING FACE} dog", "cat \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} dog"
    (found,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    expected = log_p(lm, " " + same_tokens).sum().item() - (2 + 4) * math.log(256)
    assert found == pytest.approx(expected, abs=1e-3)
    ((alone, is_greedy),) = lm.loglikelihood(instances("loglikelihood", ("cat ", "\u00e9")))
    assert alone == pytest.approx(log_p(lm, "cat \N{REPLACEMENT CHARACTER}")[-1].item() - 2 * BYTE_NATS, abs=1e-4)
    assert not is_greedy


def test_a_continuation_is_scored_behind_what_fits_of_its_context(language_model):
    lm = language_model(batch_size=3)
    context = "over green tree runs dog cat "
    requests = [("cat", " dog"), ("", "dog"), (context, "tree"), ("cat ", context), ("cat", "")]
    found = lm.loglikelihood(instances("loglikelihood", *requests))
    expected = [
        log_p(lm, "cat dog")[-4:].sum(),
        log_p(lm, " dog").sum(),
        # The window has 16 positions.
        log_p(lm, (context + "tree")[-17:])[-4:].sum(),
        # Longer than it: pieces, one behind the other.
        sum(log_p(lm, (" " + context)[start : start + 17]).sum() for start in range(0, len(context), 16)),
        0.0,
    ]
    assert [value for value, _ in found] == pytest.approx([float(value) for value in expected], abs=1e-4)
    assert found[-1] == (0.0, True)
    rolling = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (context,), ("",)))
    assert rolling == pytest.approx([float(expected[3]), 0.0], abs=1e-4)


def test_text_is_that_of_generate_py_up_to_a_stop(finished, language_model):
    lm, folder = language_model(), finished[0]
    model, record = load_checkpoint(folder / "checkpoint" / "final", device="cpu")
    greedy = sample(model, record, "cat", num_tokens=20, temperature=0)
    stop = greedy[6:8]
    requests = [("cat", {"max_gen_toks": 20}), ("cat", {"max_gen_toks": 20, "until": [stop, "never"]})]
    found = lm.generate_until(instances("generate_until", *requests))
    assert found == [greedy, greedy[: greedy.find(stop)]]
    (is_likely,) = lm.loglikelihood(instances("loglikelihood", ("cat", greedy[:10])))
    assert is_likely[1]
    how = {"max_gen_toks": 20, "do_sample": True, "temperature": 0.7, "top_k": 3}
    (sampled,) = lm.generate_until(instances("generate_until", ("cat", how)))
    assert sampled == sample(model, record, "cat", num_tokens=20, temperature=0.7, top_k=3)
    # Of no temperature a sample is greedy, and none that is given is exchanged.
    coldest = lm.generate_until(instances("generate_until", ("cat", how | {"temperature": 0})))
    assert coldest == [greedy]
    with pytest.raises(UserError, match="gen_kwargs: top_p: unknown; there is until, max_gen_toks"):
        lm.generate_until(instances("generate_until", ("cat", {"top_p": 0.9})))


@pytest.mark.slow
def test_the_command_finds_the_model_and_a_mistake_is_one_line(finished, tmp_path):
    folder, split = finished
    (tmp_path / "document.jsonl").write_text(json.dumps({"text": split[:200]}) + "\n")
    (tmp_path / "words.yaml").write_text(TASK.replace("FILE", str(tmp_path / "document.jsonl")))
    command = [sys.executable, "-m", "attnbench.export.lm_eval", "--model", "attnbench", "--device", "cpu"]
    command += ["--include_path", str(tmp_path), "--tasks", "words", "--batch_size", "4", "--model_args"]
    environment = {**python_path(Path(__file__).parents[2]), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def call(arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = call(f"run={folder},checkpoint=best")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\|words\|.*bits_per_byte *\|↓ *\| *[0-9.]+", done.stdout), done.stdout
    done = call(f"run={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: run={tmp_path}: has no finished training")
    assert "Traceback" not in done.stderr
