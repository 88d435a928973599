"""generate.py: the same text by cache and by recomputation, sampled as asked, and nothing that a terminal obeys."""

import io
import json
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from decoding import MODEL, prompt, small_model
from safetensors.torch import load_file, save_file
from scripts_here import run_here
from small import MIXERS, OPERATORS, TINY_RUN, VOCABULARY, mixer_settings, one_an_operator
from torch import Tensor

from attnbench.cli.compose import compose
from attnbench.cli.generation import encode_prompt, write_text
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_generation
from attnbench.comparison.execute import run
from attnbench.data.tokenizer import Characters
from attnbench.machine.precision import computing
from attnbench.model.building import build_model, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import Sampling, Writer, write_by_recomputation
from attnbench.settings import registry
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable_text

TEXT = "the quick brown fox jumps over the lazy dog\n\x1b[2J"


def written(tokens) -> Tensor:
    with torch.no_grad():
        return torch.stack(list(tokens), dim=1)


def sampling(batch_size: int = 3, **how) -> Sampling:
    return Sampling(batch_size=batch_size, num_characters=len(VOCABULARY) - 1, **how)


def writer(model, chosen_by: Sampling, batch_size: int = 3, max_length: int = 330) -> Writer:
    return Writer(model, chosen_by, batch_size=batch_size, max_length=max_length, dtype=torch.float32, captured=False)


@pytest.mark.parametrize(
    ("length", "name"),
    [
        *((5, name) for name in MIXERS),
        # A chunk of 64 ends within what is written.
        *((310, name) for name in OPERATORS),
        *(pytest.param(1, name, marks=pytest.mark.slow) for name in OPERATORS),
    ],
)
def test_the_text_is_the_same_by_cache_and_by_recomputation(name, length):
    model, prompt_BT = small_model(name), prompt(length)
    by_cache = written(writer(model, sampling()).write(prompt_BT, 12))
    by_recomputation = written(write_by_recomputation(model, prompt_BT, 12, sampling()))
    assert torch.equal(by_cache, by_recomputation)
    assert by_cache.shape == (3, 12)
    assert len(by_cache.unique()) > 1


def test_so_it_is_where_it_is_sampled():
    model, prompt_BT = small_model("gated_deltanet"), prompt(5)
    how = {"temperature": 0.7, "top_k": 5, "seed": 3}
    by_cache = written(writer(model, sampling(**how)).write(prompt_BT, 30))
    assert torch.equal(by_cache, written(write_by_recomputation(model, prompt_BT, 30, sampling(**how))))
    other_seed = written(writer(model, sampling(**how | {"seed": 4})).write(prompt_BT, 30))
    assert not torch.equal(by_cache, other_seed)


@pytest.mark.parametrize("name", one_an_operator())
def test_sequences_of_a_batch_are_written_as_if_alone_and_a_writer_writes_again(name):
    model, prompt_BT = small_model(name), prompt(7)
    one = writer(model, sampling())
    together = written(one.write(prompt_BT, 12))
    alone = [written(writer(model, sampling(1), 1).write(prompt_T[None], 12)) for prompt_T in prompt_BT]
    assert torch.equal(together, torch.cat(alone))
    assert len(together.unique(dim=0)) > 1
    assert torch.equal(written(one.write(prompt_BT, 12)), together)


def test_a_text_longer_than_its_room_is_refused():
    with pytest.raises(ValueError, match=r"7 \+ 4 positions: there is room for 10"):
        written(writer(small_model("softmax"), sampling(), max_length=10).write(prompt(7), 4))


def drawn(logits_C: Tensor, num_draws: int, **how) -> Tensor:
    """How often each token is chosen, as shares."""
    one = Sampling(batch_size=num_draws, num_characters=4, **how)
    one.draw()
    tokens_B = one.choose(logits_C.expand(num_draws, -1))
    return tokens_B.bincount(minlength=len(logits_C)) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_the_probabilities_of_softmax(temperature):
    # The last token stands for no character, though the most likely.
    logits_C = torch.tensor([1.0, 0.0, -1.0, 2.0, 9.0])
    expected_C = (logits_C[:4] / temperature).softmax(-1)
    shares_C = drawn(logits_C, 40_000, temperature=temperature)
    assert shares_C[4] == 0
    torch.testing.assert_close(shares_C[:4], expected_C, rtol=0, atol=0.01)


def test_no_more_than_the_most_likely_k_are_drawn():
    logits_C = torch.tensor([1.0, 0.0, -1.0, 2.0, 9.0])
    assert drawn(logits_C, 5000, temperature=5.0, top_k=2).gt(0).tolist() == [True, False, False, True, False]
    assert drawn(logits_C, 100, temperature=5.0, top_k=1)[3] == 1
    assert drawn(logits_C, 5000, temperature=5.0, top_k=99).gt(0).tolist() == [True] * 4 + [False]
    assert drawn(logits_C, 100)[3] == 1


def test_noise_of_zero_chooses_nothing_that_is_impossible():
    one = Sampling(batch_size=1, num_characters=3, temperature=1.0, top_k=2)
    one.noise_BC.zero_()
    assert one.choose(torch.tensor([[3.0, 1.0, 2.0]])).tolist() == [0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny run whose corpus has escape sequences."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT * 60)
    words = [*TINY_RUN, f"data.path={folder / 'text.txt'}", f"outputs_dir={folder}", "logger=none", "device=cpu"]
    return run(compose([*words, "attn=gated_deltanet", "eval=[]"]))


def generate(monkeypatch, folder: Path, *words: str, given: bytes = b"") -> object:
    """The exit code of `scripts/generate.py run=...` with something on standard input, None for 0."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr("sys.argv", ["scripts/generate.py", f"run={folder}", "device=cpu", "num_tokens=40", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    code = None
    try:
        launch(write_text, "generate", read=read_generation)
    except SystemExit as ending:
        code = ending.code
    return code


def test_the_prompt_comes_from_words_a_file_or_standard_input(folder, monkeypatch, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("the quick\n")
    assert generate(monkeypatch, folder, "prompt=the quick") is None
    by_words = capsys.readouterr()
    assert by_words.out.startswith("the quick")
    assert len(by_words.out) >= len("the quick") + 40
    assert "gated_deltanet (torch), float32, " in by_words.err
    assert "1 × 40 characters in " in by_words.err
    assert generate(monkeypatch, folder, f"prompt_file={tmp_path / 'prompt.txt'}") is None
    assert capsys.readouterr().out == by_words.out
    assert generate(monkeypatch, folder, given=b"the quick\n") is None
    assert capsys.readouterr().out == by_words.out
    assert generate(monkeypatch, folder, "seed=1", given=b"the quick") is None
    assert capsys.readouterr().out != by_words.out


def test_several_texts_follow_one_prompt(folder, monkeypatch, capsys):
    assert generate(monkeypatch, folder, "prompt=the", "num_samples=3", "temperature=2", "checkpoint=best") is None
    texts = re.findall(r"^--- (\d) of 3\nthe(.{40,}?)\n(?=---|\Z)", capsys.readouterr().out, re.DOTALL | re.MULTILINE)
    assert [number for number, _ in texts] == ["1", "2", "3"]
    assert len({text for _, text in texts}) == 3


def test_that_a_layer_recomputes_the_whole_text_is_said_once(folder, monkeypatch, capsys):
    said = []
    for backend in ("torch", ""):
        monkeypatch.setattr(LanguageModel, "backend_without_state", backend)
        assert generate(monkeypatch, folder, "prompt=the", "num_samples=2") is None
        said.append(capsys.readouterr().err.count("no decoding state"))
    assert said == [1, 0]


def test_nothing_is_written_that_a_terminal_obeys(folder, monkeypatch, capsys):
    # At a high temperature every character of the corpus comes.
    assert generate(monkeypatch, folder, "temperature=1000", "num_tokens=400", given=b"\x1b[2J") is None
    said = capsys.readouterr()
    assert said.out.startswith("\\x1b[2J")
    assert "\x1b" not in said.out + said.err
    assert said.out.count("\\x1b") > 1
    assert printable_text("a\tb\nc\r\x1b\u202e") == "a\tb\nc\\r\\x1b\\u202e"


@pytest.mark.parametrize("how", [[], ["num_samples=2"]])
def test_a_model_whose_logits_are_not_finite_writes_nothing(how, folder, monkeypatch, capsys, tmp_path):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    final = broken / "checkpoint" / "final"
    weights = load_file(final / "weights.safetensors")
    weights["norm.weight"][0] = torch.nan
    save_file(weights, final / "weights.safetensors")
    state = json.loads((final / "state.json").read_text())
    state["sha256"]["weights.safetensors"] = sha256((final / "weights.safetensors").read_bytes()).hexdigest()
    (final / "state.json").write_text(json.dumps(state))
    assert generate(monkeypatch, broken, "prompt=the", *how) == 1
    said = capsys.readouterr()
    assert "logits are not finite in float32" in said.err
    assert said.out.strip() in ("", "the")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(folder, root):
    command = f"{sys.executable} scripts/generate.py run={folder} device=cpu num_tokens=3000 prompt=the | head -c 9"
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("the")
    assert len(done.stdout) == 9
    (said,) = done.stderr.splitlines()
    # Of those that nobody read, only what was written until the pipe said so.
    assert 0 < int(re.search(r"1 × (\d+) characters in", said)[1]) < 3000  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ([], "the Été\n", "the prompt has É (U+00C9), é (U+00E9): not among the 32 characters of the run's corpus"),
        (["prompt=ABCDEFGHIJKLM"], "", "A (U+0041), B (U+0042)"),
        (["prompt=ABCDEFGHIJKLM"], "", "K (U+004B), 2 more: not among"),
        (["prompt='\u202e'"], "", "\\u202e (U+202E)"),
        ([], "", "standard input: is empty"),
        (["prompt=''"], "", "prompt: is empty"),
        (["prompt_file=nowhere.txt"], "", "prompt_file=nowhere.txt: cannot be read (No such file"),
        (["prompt=a", "prompt_file=b"], "", "prompt=a and prompt_file=b: give one of them"),
        (["prompt=3"], "", "prompt=3: must be a text or null"),
        (["prompt=a", "backend=flash_attn"], "", "attn.backend=flash_attn: GatedDeltaNet has auto, torch"),
    ],
)
def test_what_cannot_be_continued_is_one_line(words, given, message, folder, monkeypatch, capsys):
    assert generate(monkeypatch, folder, *words, given=given.encode()) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_bytes_that_are_no_text_are_an_error(folder, monkeypatch, capsys):
    assert generate(monkeypatch, folder, given=b"\xff\xfe") == 1
    assert "standard input: not valid UTF-8 (invalid start byte at byte 0); convert" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_prompt(folder, monkeypatch, capsys):
    assert generate(monkeypatch, folder, given="\ufeffthe\n".encode()) is None
    assert capsys.readouterr().out.startswith("the")


def test_a_run_without_a_checkpoint_is_an_error(folder, monkeypatch, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    assert generate(monkeypatch, tmp_path, "prompt=a") == 1
    assert "has no finished training" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["generate.py", "evaluate.py"])
def test_a_run_of_a_mixer_from_outside_says_which_words_are_missing(folder, script, tmp_path, monkeypatch):
    (tmp_path / "my_conf" / "attn").mkdir(parents=True)
    (tmp_path / "my_conf" / "attn" / "mine.yaml").write_text("_target_: my_softmax.Mine\nbackend: auto\n")
    # Commands find modules of the current folder, so they run in a folder without one.
    (elsewhere := tmp_path / "elsewhere").mkdir()
    source = "from attnbench.mixers.softmax import Softmax\n\n\nclass Mine(Softmax):\n    pass\n"
    (tmp_path / "my_softmax.py").write_text(source)
    trained = [*TINY_RUN, f"data.path={folder.parents[1] / 'text.txt'}", f"outputs_dir={tmp_path}", "logger=none"]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        made = run(compose([*trained, "attn=mine", "eval=[]", "device=cpu"], config_dir=tmp_path / "my_conf"))
        del sys.modules["my_softmax"]
    registry.TRUSTED.clear()
    words = [f"run={made}", "device=cpu", *{"generate.py": ["prompt=the"]}.get(script, ["eval=[]"])]
    code, _, said = run_here(script, *words, cwd=elsewhere)
    assert code == 1
    assert "_target_=my_softmax.Mine: is no class of attnbench; if you trust it, add --config-dir FOLDER" in said
    code, _, said = run_here(script, "--config-dir", "../my_conf", *words, cwd=elsewhere)
    assert code == 1
    assert "there is no module my_softmax; PYTHONPATH=FOLDER before the command finds my_softmax.py there" in said
    code, _, said = run_here(script, "--config-dir", "my_conf", *words, cwd=tmp_path)
    assert code == 0, said


def test_each_mixer_of_a_hybrid_has_the_backend_that_the_run_named(folder, monkeypatch, tmp_path):
    trained = [*TINY_RUN, f"data.path={folder.parents[1] / 'text.txt'}", f"outputs_dir={tmp_path}", "logger=none"]
    hybrid = ["attn=hybrid", "attn.layers=[flash,softmax]", "attn.options.flash.backend=sdpa"]
    made, asked = run(compose([*trained, *hybrid, "eval=[]", "device=cpu"])), []

    def resolve(mixer, *rest, **how):
        # By what was asked for: on a CPU auto comes to the same kernels.
        asked.append((mixer.name, mixer.options["backend"]))
        return resolve_mixer(mixer, *rest, **how)

    monkeypatch.setattr("attnbench.model.stored.resolve_mixer", resolve)
    assert generate(monkeypatch, made, "prompt=the") is None
    assert asked == [("flash", "sdpa"), ("softmax", "auto")]
    del asked[:]
    assert generate(monkeypatch, made, "prompt=the", "backend=auto") is None
    assert asked == [("flash", "auto"), ("softmax", "auto")]


def test_a_character_that_a_prompt_has_is_a_token():
    assert encode_prompt("ab", Characters("ab?")).tolist() == [0, 1]
    with pytest.raises(UserError, match=r"\? \(U\+003F\)"):
        encode_prompt("a?", Characters("ab?"))


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 5}])
@pytest.mark.parametrize("name", MIXERS)
def test_a_captured_step_writes_the_same(name, how):
    settings = mixer_settings(name)
    settings.options["backend"] = "auto"
    mixer = resolve_mixer(settings, MODEL, device_type="cuda", precision="float32")
    model = build_model([mixer] * 2, MODEL, vocabulary_size=len(VOCABULARY), seed=0, device="cuda")
    model.load_state_dict(small_model(name).state_dict())
    prompt_BT, device, texts = prompt(70, "cuda"), torch.device("cuda", 0), []
    with computing("float32", device):
        for captured in (False, True, True):
            one = Writer(
                model,
                sampling(device="cuda", **how),
                batch_size=3,
                max_length=130,
                dtype=torch.float32,
                captured=captured,
            )
            texts.append(written(one.write(prompt_BT, 60)))
            if not how:
                # The recorded step belongs to the writer, and so its state begins anew.
                assert torch.equal(written(one.write(prompt_BT, 60)), texts[-1])
        texts.append(written(write_by_recomputation(model, prompt_BT, 60, sampling(device="cuda", **how))))
    # What has learned nothing may write one letter for ever, unless it is drawn.
    assert len(texts[0].unique()) > (2 if how else 0)
    assert all(torch.equal(text, texts[0]) for text in texts[1:])
