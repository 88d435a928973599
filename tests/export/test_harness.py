"""lm-evaluation-harness on a run: likelihoods are those of our perplexity evaluation, texts those of generate.py."""

import json
import math
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from small import TINY_RUN, compose_once, python_path, rewrite_checkpoint

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
    # As in the harness's own models, a temperature alone asks for samples.
    (warm,) = lm.generate_until(
        instances("generate_until", ("cat", {"max_gen_toks": 20, "temperature": 0.7, "top_k": 3}))
    )
    assert warm == sampled


def test_repeats_are_independent_and_come_again(language_model):
    request = ("cat", {"max_gen_toks": 20, "do_sample": True})
    found = language_model().generate_until(instances("generate_until", *4 * [request]))
    assert len(set(found)) == 4
    assert language_model().generate_until(instances("generate_until", *4 * [request])) == found
    assert language_model(seed=1).generate_until(instances("generate_until", *2 * [request])) == found[1:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "gen_kwargs: top_p=0.9: unknown setting"),
        ({"temperature": -1}, "gen_kwargs: temperature=-1: must be 0 or at least 1e-06"),
        ({"temperature": math.nan}, "gen_kwargs: temperature=nan: must be"),
        ({"temperature": math.inf}, "gen_kwargs: temperature=inf: must be finite"),
        ({"temperature": 1e-40}, "gen_kwargs: temperature=1e-40: must be 0 or at least 1e-06"),
        ({"temperature": "hot"}, "gen_kwargs: temperature=hot: must be a number"),
        ({"max_gen_toks": 0}, "gen_kwargs: max_gen_toks=0: must be at least 1"),
        ({"max_gen_toks": 2.5}, "gen_kwargs: max_gen_toks=2.5: must be an integer"),
        ({"top_k": 0}, "gen_kwargs: top_k=0: must be at least 1"),
        ({"do_sample": "yes"}, "gen_kwargs: do_sample=yes: must be true or false"),
        ({"until": 3}, "gen_kwargs: until=3: must be a text or a list"),
    ],
)
def test_options_of_writing_are_checked_before_anything_is_written(language_model, monkeypatch, options, message):
    lm = language_model()
    monkeypatch.setattr(lm, "_written", lambda *_, **__: pytest.fail("has written"))
    with pytest.raises(UserError, match=re.escape(message)):
        lm.generate_until(instances("generate_until", ("cat", {}), ("cat", {"do_sample": True, **options})))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run=0001", "--model_args run=1: the harness reads it as a number; quote it to give a text"),
        ("run={run},prefix=1", "--model_args prefix=1: the harness reads it as a number"),
        ("run=none", "run=null: must be a text"),
        ("checkpoint=best", "run: must be given"),
        ("run={run},wndow=3", "wndow=3: unknown setting (did you mean window?)"),
        ("run={run},window=1.5", "window=1.5: must be an integer"),
        ("run={run},window=0", "window=0: must be at least 1"),
        ("run={run},seed=-1", "seed=-1: must be at least 0"),
        ("run={run},checkpoint=1", "checkpoint=1: must be a text"),
        ("run={run},precision=int8", "precision=int8: must be one of auto, "),
        ("run={run},precision=tf32", "precision=tf32: only CUDA devices have it"),
        ("run={run},device=cuda", "--model_args device=cuda: is an argument of the harness; give --device cuda"),
    ],
)
def test_arguments_of_the_model_are_checked_in_the_words_of_the_harness(finished, arguments, message):
    from attnbench.export.harness import AttnbenchLM

    with pytest.raises(UserError, match=re.escape(message)):
        AttnbenchLM.create_from_arg_string(arguments.format(run=finished[0]), {"device": "cpu", "batch_size": 1})


def test_a_number_in_quotes_is_a_text(finished, tmp_path, monkeypatch):
    from attnbench.export.harness import AttnbenchLM

    monkeypatch.chdir(tmp_path)
    (tmp_path / "0001").symlink_to(finished[0])
    lm = AttnbenchLM.create_from_arg_string("run='0001'", {"device": "cpu", "batch_size": "auto", "max_batch_size": 7})
    assert lm.batch_size == 7
    for size in ("x", "0", 2.5, True):
        with pytest.raises(UserError, match=f"batch_size={size}: must be"):
            AttnbenchLM(run="0001", device="cpu", batch_size=size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_the_device_is_auto_and_one_that_is_missing_is_named_in_plain_words(language_model, monkeypatch, caplog):
    from attnbench.export import lm_eval

    caplog.set_level("INFO")
    language_model(device="auto")
    assert re.search(r"device=auto: .+, float32", caplog.text)
    with pytest.raises(UserError, match="device=cuda:0: this machine has no CUDA device; cpu and auto work here"):
        language_model(device="cuda:0")
    calls = {
        "--model attnbench --tasks words": ["--device", "auto"],
        "run -M attnbench --tasks words": ["--device", "auto"],
        "--model attnbench --device cuda:0": [],
        "--model attnbench --config settings.yaml": [],
        "--model hf --tasks words": [],
        "ls tasks": [],
    }
    for words, added in calls.items():
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split()])
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
        lm_eval.main()
        assert sys.argv[1:] == [*words.split(), *added], words


def test_a_model_that_is_not_finite_scores_nothing(finished, language_model, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(finished[0], damaged)
    final = damaged / "checkpoint" / "final"
    weights = load_file(final / "weights.safetensors")
    weights["norm.weight"][0] = torch.inf
    rewrite_checkpoint(final, "weights.safetensors", save(weights))
    with pytest.raises(UserError, match=r"its weights norm\.weight are not all finite"):
        language_model(run=str(damaged))
    lm = language_model()
    # Finite, and too large for its logits.
    lm.model.norm.weight.data.fill_(3e38)
    lm.model.embedding.weight.data.fill_(1.0)
    calls = {
        "loglikelihood": lambda: lm.loglikelihood(instances("loglikelihood", ("cat", "dog"))),
        "loglikelihood_rolling": lambda: lm.loglikelihood_rolling(instances("loglikelihood_rolling", ("cat",))),
        "generate_until": lambda: lm.generate_until(instances("generate_until", ("cat", {}))),
    }
    for name, call in calls.items():
        with pytest.raises(UserError, match="the model's logits are not finite in float32"):
            pytest.fail(f"{name}: {call()}")


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
