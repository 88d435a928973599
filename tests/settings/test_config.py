"""Every mistake on a command line is one line that names the setting, the value and what is allowed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import yaml
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from scripts_here import run_here
from small import MIXERS

from attnbench.cli.compose import CONF, compose
from attnbench.cli.help import read_comments
from attnbench.cli.sweeps import SweepOutcomes, readable
from attnbench.model.building import build_meta
from attnbench.model.matching import REFERENCE
from attnbench.settings.errors import UserError
from attnbench.settings.registry import TRUSTED

DEMO = ["experiment=demo", "device=cpu"]

BAD = {
    "attn=nope": ["attn=nope", "flash", "gated_deltanet", "linear", "softmax"],
    "train.foo=1": ["train.foo=1", "unknown setting", "learning_rate"],
    "+train.foo=1": ["train.foo=1", "unknown setting", "learning_rate"],
    "+foo=1": ["foo=1", "unknown setting", "seq_len"],
    "foo=1": ["foo=1", "unknown setting", "seq_len"],
    "trian.num_steps=5": ["trian.num_steps=5", "did you mean train?"],
    "eval=[recal]": ["eval=recal", "did you mean recall?"],
    "plan=demo": ["plan=demo", "attnbench compare plan=demo"],
    "+plan=demo": ["plan: unknown setting", "attnbench compare has it"],
    "num_tokens=5": ["num_tokens=5", "attnbench generate num_tokens=5"],
    "experiment=dmeo": ["experiment=dmeo", "did you mean demo?"],
    "experiment=[demo,mine]": ["experiment=[demo,mine]", "one name"],
    "experiment=../mine": ["experiment=../mine", "letters"],
    "logger.tags=mine": ["logger.tags=mine", "a list"],
    "attn.foo=1": ["attn.foo=1", "unknown setting", "conv_size"],
    "+eval.perplexity.foo=1": ["eval.perplexity.foo=1", "unknown setting", "extrapolation"],
    "+eval.nope.foo=1": ["eval.nope"],
    "~train.learning_rate": ["~train.learning_rate", "cannot be deleted"],
    "~attn": ["attn"],
    "train.batch_size=many": ["train.batch_size=many", "an integer"],
    "train.batch_size=0": ["train.batch_size=0", "at least 1"],
    "train.batch_size=true": ["train.batch_size=True", "an integer"],
    "train.learning_rate=nan": ["train.learning_rate=nan", "above 0"],
    "train.learning_rate=null": ["train.learning_rate=null", "a number"],
    "train.learning_rate=inf": ["train.learning_rate=inf", "finite"],
    "outputs_dir=": ["outputs_dir", "folder"],
    "train.micro_batch_size=5": ["train.micro_batch_size=5", "divide", "batch_size=16"],
    "train.num_epochs=null": ["train.num_epochs=null", "train.num_steps=null", "set one"],
    "train.num_steps=1000000000000": ["train.num_steps=1000000000000", "at most 99999999"],
    "train.precision=fp8": ["train.precision=fp8", "bfloat16"],
    "train.precision=tf32": ["train.precision=tf32", "CUDA"],
    "train.compile=maybe": ["train.compile=maybe", "true or false"],
    "attn.conv_size=wide": ["attn.conv_size=wide", "an integer"],
    "attn.rotary_theta=0": ["attn.rotary_theta=0, head_width=", "attn.rotary_theta=null leaves them out"],
    "attn.backend=cuda": ["attn.backend=cuda", "torch"],
    "attn._target_=os.system": ["os.system", "attnbench"],
    "attn._target_=": ["_target_"],
    "attn._target_=attnbench.model.language_model.Block": ["attnbench.model.language_model.Block", "Mixer"],
    "seq_len=0": ["seq_len=0", "at least 1"],
    "seed=-1": ["seed=-1", "at least 0"],
    "match=size": ["match=size", "params", "state"],
    "device=cuda": ["device=cuda", "no CUDA device"],
    "device=tpu": ["device=tpu", "cpu"],
    "device=cpu:7": ["device=cpu:7", "cpu, cuda"],
    "+trusted=[os.system]": ["trusted=['os.system']", "unknown setting", "seq_len"],
    "+mixer=x": ["mixer=x", "unknown setting"],
    "model.head_width=48": ["head_width=48: must divide model.dim=128; set model.head_width", "16, 32, 64, 128"],
    "model.dropout=1": ["model.dropout=1", "below 1"],
    "data.validation_fraction=0": ["data.validation_fraction=0", "above 0"],
    "data.validation_fraction=0.5 data.test_fraction=0.45": ["validation_fraction=0.5", "0.45", "together at most 0.9"],
    "data.validation_fraction=0.9": ["data.validation_fraction=0.9", "at most 0.5"],
    "data=text": ["data.path=null", "data=text"],
    "data.tokenizer=words": ["data.tokenizer=words", "characters, bytes, bpe"],
    "data.tokenizer=bpe": ["data.vocabulary_size=null", "data.tokenizer=bpe"],
    "data.tokenizer=bpe data.vocabulary_size=255": ["data.vocabulary_size=255", "data.tokenizer=bpe", "256 at least"],
    "data.tokenizer=bytes data.vocabulary_size=9": ["data.vocabulary_size=9", "data.tokenizer=bytes", "256 at least"],
    "train.num_epochs=2 train.num_tokens=640": ["train.num_epochs=2", "train.num_tokens=640", "set one"],
    "train.num_steps=2 train.num_tokens=640": ["train.num_steps=2", "train.num_tokens=640", "set one"],
    "train.num_epochs=null train.num_tokens=0": ["train.num_tokens=0", "at least 1"],
    "logger.mode=loud": ["logger.mode=loud", "offline"],
    "seq_len=[1,2]": ["seq_len", "an integer"],
    "seq_len=": ["seq_len"],
    "=3": ["=3", "names no setting"],
    "eval=[nope]": ["eval=nope", "recall", "perplexity"],
    "eval=[perplexity] eval.perplexity.extrapolation=[0]": ["extrapolation=[0]", "at least 1"],
    "eval.recall.preset=tiny": ["eval.recall", "perplexity"],
}
BENCHMARK, COMPARE, DOCTOR = "bench", "compare", "doctor"
EVALUATE, GENERATE = "evaluate", "generate"
BAD_OF_OTHERS = {
    (BENCHMARK, "bench=nope"): ["bench=nope", "attention", "grid"],
    (BENCHMARK, "precision=fp8"): ["precision=fp8", "float16", "tf32"],
    (BENCHMARK, "precision=tf32"): ["precision=tf32", "CUDA"],
    (BENCHMARK, "foo=1"): ["foo=1", "unknown setting", "precision"],
    (BENCHMARK, "bench.foo=1"): ["bench.foo=1", "unknown setting", "head_widths"],
    (BENCHMARK, "bench.lengths=[0]"): ["bench.lengths=[0]", "at least 1"],
    (BENCHMARK, "bench.lengths=64"): ["bench.lengths=64", "a list"],
    (BENCHMARK, "bench.causal=maybe"): ["bench.causal=maybe", "true or false"],
    (BENCHMARK, "bench.implementations=[magic]"): ["bench.implementations", "magic", "textbook", "triton"],
    (BENCHMARK, "bench.implementations=[triton,triton]"): ["bench.implementations", "twice"],
    (BENCHMARK, "bench._target_=os.system"): ["os.system", "attnbench"],
    (COMPARE, "plan=nope"): ["plan=nope", "compare", "demo", "published"],
    (COMPARE, "plan=dmeo"): ["plan=dmeo", "did you mean demo?"],
    (COMPARE, "attn=linear"): ["attn=linear", "attnbench train attn=linear"],
    (COMPARE, "model=tiny"): ["model=tiny", "in a plan it is a word of its overrides"],
    (COMPARE, "reprt=false"): ["reprt=false", "did you mean report?"],
    (COMPARE, "plan.foo=1"): ["plan.foo=1", "unknown setting", "variants"],
    (COMPARE, "plan.fraction=third"): ["plan.fraction=third", "full, half"],
    (COMPARE, "+plan.factors.gate=[a,b]"): ["plan.factors", "at least two"],
    (COMPARE, "foo=1"): ["foo=1", "unknown setting", "outputs_dir"],
    (COMPARE, "+command=x"): ["command=x", "unknown setting"],
    (COMPARE, "+exported=x"): ["exported=x", "unknown setting", "export"],
    (COMPARE, "~plan"): ["~plan", "cannot be deleted"],
    (COMPARE, "plan.only=[nope]"): ["plan.only", "nope", "recall", "scaling"],
    (COMPARE, "plan.only=[recal]"): ["plan.only", "recal", "did you mean recall?"],
    (COMPARE, "plan.only=recall"): ["plan.only=recall", "a list"],
    (COMPARE, "plan.variants.softmax=['attn=softmax','train.learning_rate=1']"): ["train.learning_rate=1", "nothing"],
    (COMPARE, "plan.overrides=['seed=7']"): ["plan.overrides", "seed=7", "plan.seeds"],
    (COMPARE, "plan.rank=[nope]"): ["plan.rank", "nope", "softmax"],
    (COMPARE, "plan.reference=nope"): ["plan.reference", "nope", "softmax"],
    (COMPARE, "plan.seeds=[]"): ["plan.seeds=[]", "at least one"],
    (COMPARE, "plan.probe_seeds=[0,0]"): ["plan.probe_seeds=[0, 0]", "twice"],
    (COMPARE, "plan.probe_seeds=[1.5]"): ["plan.probe_seeds=[1.5]", "an integer"],
    (COMPARE, "plan.learning_rates=[0]"): ["plan.learning_rates=[0]", "above 0"],
    (COMPARE, "plan.overrides=[3]"): ["plan.overrides=[3]", "a text"],
    (COMPARE, "plan.overrides=['foo=1']"): ["foo=1", "unknown setting", "seq_len"],
    (COMPARE, "plan.overrides=['eval.recall.preset=tiny']"): ["eval.recall.preset=tiny", "small", "zoology"],
    (COMPARE, "plan.overrides=['eval.inference.x=1']"): ["eval.inference.x=1", "plan.evaluations", "plan.only"],
    (COMPARE, "plan.evaluations=[nope,perplexity]"): ["eval=nope", "recall"],
    (COMPARE, "plan.tested=[mad]"): ["plan.tested=['mad']", "plan.evaluations=[", "plan.tested=null"],
    (COMPARE, "+plan.variants.mine=['attn.conv_size=4']"): ["plan.variants.mine", "attn=NAME"],
    (COMPARE, "export=cells.jsonl"): ["export=cells.jsonl", "no complete results"],
    (COMPARE, "import=cells.jsonl"): ["cells.jsonl", "cannot be read"],
    (DOCTOR, "mixers=[sofmax]"): ["attn=sofmax: unknown (did you mean softmax?); there is "],
    (DOCTOR, "mixers=softmax"): ["mixers=softmax: must be a list or null"],
    (DOCTOR, "+mixer=softmax"): ["mixer=softmax: unknown setting (did you mean mixers?); there is mixers"],
    (EVALUATE, "eval=[nope]"): ["eval=nope", "recall"],
    (EVALUATE, "eval.recall.preset=tiny"): ["eval.recall", "perplexity"],
    (EVALUATE, "foo=1"): ["foo=1", "unknown setting", "rerun"],
    (EVALUATE, "run=nowhere"): ["nowhere: ", "config.yaml", "folder of a run"],
    (EVALUATE, "device=cpu"): ["run", "must be given"],
    (GENERATE, "+foo=1"): ["foo=1", "unknown setting", "num_tokens"],
    (GENERATE, "run=???"): ["run", "must be given"],
    (GENERATE, "checkpoint=last"): ["checkpoint=last", "final, best"],
    (GENERATE, "num_tokens=0"): ["num_tokens=0", "at least 1"],
    (GENERATE, "prompt=hello,world"): ["prompt=hello,world", "standard input", "prompt_file="],
    (GENERATE, "seed=1=2"): ["seed=1=2", "quotes"],
    (GENERATE, "temperature=-1"): ["temperature=-1", "0 or at least 1e-06"],
    (GENERATE, "temperature=1e-40"): ["temperature=1e-40", "0 or at least 1e-06"],
    (GENERATE, "temperature=inf"): ["temperature=inf", "finite"],
    (GENERATE, "prompt=1984"): ["prompt=1984", "a text", "'prompt=\"1984\"'"],
    (GENERATE, "prompt=${run}"): ["prompt: has ${...}", "standard input", "prompt_file="],
    (COMPARE, "plan=docs/mine.yaml"): ["plan=docs/mine.yaml: unknown; there is ", "demo"],
    (GENERATE, "~seed"): ["~seed", "cannot be deleted"],
}
"""By script: what is wrong with one of its overrides, and what the line has to say."""


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_is_one_line_that_names_it(override: str) -> None:
    if override == "device=cuda":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError) as caught:
        compose([*DEMO, *re.split(r" (?=data\.|eval\.|train\.)", override)])
    message = str(caught.value)
    assert "\n" not in message
    for part in BAD[override]:
        assert part in message, message


@pytest.mark.parametrize(("script", "override"), BAD_OF_OTHERS)
def test_a_bad_override_of_another_script_is_one_line(script: str, override: str, tmp_path: Path) -> None:
    own = {COMPARE: ["plan=demo", "plan.dry_run=true"], GENERATE: ["run=x"]}.get(script, [])
    given = own if script in (EVALUATE, GENERATE) else [*own, "device=cpu", f"outputs_dir={tmp_path}"]
    code, _, said = run_here(script, *given, override, cwd=tmp_path)
    assert code == 1
    assert said.startswith("error: ")
    assert said.count("\n") == 1, said
    for part in BAD_OF_OTHERS[script, override]:
        assert part in said, said


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_of_any_script_leaves_no_folder_beside_its_outputs(path: Path) -> None:
    # Hydra writes multirun.yaml wherever this says, by itself into multirun/ of the working directory.
    sweep = OmegaConf.to_container(OmegaConf.load(path).hydra.sweep)
    assert sweep == {"dir": "${outputs_dir}" if "outputs_dir" in OmegaConf.load(path) else "outputs", "subdir": "."}


def test_what_killed_sweeps_left_is_removed_by_the_next_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv(SweepOutcomes.VARIABLE, "")
    config = OmegaConf.create(
        {
            "device": "cpu",
            "hydra": {
                "overrides": {"task": []},
                "runtime": {"choices": {"hydra/launcher": "basic"}},
                "sweep": {"dir": str(tmp_path)},
            },
        }
    )
    (tmp_path / ".sweep-0a_b1c2d").mkdir()
    (tmp_path / ".sweep-0a_b1c2d" / "000000.json").write_text("{}")
    (tmp_path / ".sweep-notes").mkdir()
    SweepOutcomes().on_multirun_start(config)
    [under_way] = {path.name for path in tmp_path.iterdir()} - {".sweep-notes"}
    # As long as a process holds its folder, another sweep leaves it.
    SweepOutcomes().on_multirun_start(config)
    names = {path.name for path in tmp_path.iterdir()}
    assert {under_way, ".sweep-notes"} < names
    assert len(names) == 3


@pytest.mark.parametrize(
    ("content", "words", "told"),
    [
        (
            "hydra: {sweeper: {params: {seed: '0,1'}}}",
            ["-m", "experiment=mine,demo"],
            "hydra.sweeper.params: seed=0,1: ",
        ),
        ("hydra: {sweeper: {params: {seed: '0,1'}}}", ["experiment=mine"], "hydra.sweeper.params: seed=0,1: "),
        (
            "{defaults: [{override /hydra/launcher: submitit_local}]}",
            ["-m", "experiment=demo,mine"],
            "hydra/launcher=submitit_local: named by a yaml that the sweep chooses",
        ),
        (
            "{}",
            ["experiment=demo", "hydra/launcher=submitit_local"],
            "hydra/launcher=submitit_local: starts the jobs of",
        ),
    ],
)
def test_settings_of_a_sweep_that_hydra_ignores_are_an_error(content, words, told, tmp_path) -> None:
    if "launcher" in told:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    # The other job of a sweep ends before it has trained.
    given = [*words, "device=cpu", "data=text", "data.path=/nowhere", f"outputs_dir={tmp_path}", "logger=none"]
    code, _, errors = run_here("train.py", "--config-dir", str(tmp_path / "conf"), *given)
    assert code == 1
    assert f"error: {told}" in errors


@pytest.mark.parametrize("words", [["attn=nope", "-m", "seed=1,2"], ["seed=1", "--config-dir", ".", "attn=nope"]])
def test_options_may_stand_between_settings(words, tmp_path) -> None:
    code, _, errors = run_here("train.py", *words, f"outputs_dir={tmp_path}", cwd=tmp_path)
    assert code == 1
    assert errors.startswith("error: attn=nope: unknown; there is ")


def test_an_unknown_option_is_one_line() -> None:
    code, _, errors = run_here("train.py", "attn=linear", "--seed=1")
    assert code == 1
    assert errors.startswith("error: unrecognized arguments: --seed=1; NAME=VALUE gives a setting")
    assert errors.count("\n") == 1


def test_a_sweep_of_one_yaml_runs_all_its_jobs(tmp_path, monkeypatch) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {seed: '0,1'}}}\n"
    )
    monkeypatch.setattr("attnbench.comparison.execute.run", lambda settings: tmp_path / f"seed{settings.seed}")
    monkeypatch.setattr("attnbench.report.terminal.print_summary", lambda folders: print(*sorted(folders)))
    code, printed, _ = run_here(
        "train.py", "-m", "--config-dir", str(tmp_path), "experiment=mine", "device=cpu", f"outputs_dir={tmp_path}"
    )
    assert (code, printed) == (0, f"{tmp_path}/seed0 {tmp_path}/seed1\n")


def test_a_sweep_says_which_of_its_jobs_begins(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv(SweepOutcomes.VARIABLE, "")
    caplog.set_level("INFO", logger="attnbench")
    hydra = {"runtime": {"choices": {"hydra/launcher": "basic"}}, "sweep": {"dir": str(tmp_path)}, "job": {"num": 1}}

    def config(*words: str) -> DictConfig:
        return OmegaConf.create({"device": "cpu", "hydra": {**hydra, "overrides": {"task": list(words)}}})

    callback = SweepOutcomes()
    callback.on_multirun_start(config("attn=softmax,linear", "seq_len=64,128,256", "device=cpu"))
    callback.on_job_start(config("attn=softmax", "seq_len=128", "device=cpu"))
    assert caplog.messages == ["[2/6] attn=softmax seq_len=128"]
    # The number of a range's jobs is not known here.
    callback = SweepOutcomes()
    callback.on_multirun_start(config("seq_len=range(64,256)"))
    callback.on_job_start(config("seq_len=64"))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("override", "loads_torch"), [("train.foo=1", False), ("seq_len=-1", False), ("+attn.foo=1", True)]
)
def test_the_command_answers_at_once_without_a_traceback(root: Path, override: str, loads_torch: bool) -> None:
    command = [sys.executable, "-X", "importtime", "scripts/train.py", *DEMO, override]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    imported, said = [], []
    for line in done.stderr.splitlines():
        (imported if line.startswith("import time:") else said).append(line)
    assert len(said) == 1, said
    assert said[0].startswith("error: ")
    assert override.lstrip("+") in said[0]
    # No assertion on the speed itself, which depends on the machine: what makes it slow must not have been imported.
    names = {line.rpartition("|")[2].strip() for line in imported}
    assert ("torch" in names) == loads_torch
    assert not {"torch._dynamo", "scipy.stats", "statsmodels", "altair", "wandb"} & names


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_a_model_is_named_by_what_softmax_really_has(model: str) -> None:
    settings = compose([f"model={model}", "device=cpu"]).model
    assert settings.name == model
    built = build_meta([REFERENCE] * settings.num_layers, settings, vocabulary_size=284)
    assert built.num_parameters() == settings.parameters


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_composes(mixer: str) -> None:
    settings = compose([f"attn={mixer}", "device=cpu"])
    assert (settings.mixer.name, settings.experiment) == (mixer, "default")


@pytest.fixture(scope="module")
def my_conf(tmp_path_factory) -> Path:
    """A package of a user's own: my_mixers.py, and beside it my_conf/ with its yaml and an experiment."""
    folder = tmp_path_factory.mktemp("package")
    for group in ("attn", "experiment"):
        (folder / "my_conf" / group).mkdir(parents=True)
    (folder / "my_conf" / "attn" / "mine.yaml").write_text("_target_: my_mixers.Mine\nbackend: auto\n")
    sizes = "# @package _global_\ndefaults: [override /model: tiny, override /data: embedded]\n"
    (folder / "my_conf" / "experiment" / "mine.yaml").write_text(f"{sizes}train: {{num_epochs: null, num_steps: 7}}\n")
    (folder / "my_mixers.py").write_text(
        "from attnbench.mixers.softmax import Softmax\n\n\nclass Mine(Softmax):\n    pass\n"
    )
    return folder / "my_conf"


def test_a_yaml_that_is_none_stops_only_what_chooses_it(
    my_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(my_conf.parent)
    conf = shutil.copytree(my_conf, tmp_path / "conf")
    (conf / "attn" / "tab.yaml").write_text("a:\n\tb: 1\n")
    assert compose(["attn=mine", "device=cpu"], config_dir=conf).mixer.name == "mine"
    with pytest.raises(UserError, match=r"tab\.yaml, line 2, column 1: no yaml \(found character"):
        compose(["attn=tab", "device=cpu"], config_dir=conf)


def test_python_finds_what_a_config_dir_has(my_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(my_conf.parent)
    settings = compose(["attn=mine", "experiment=mine", "device=cpu"], config_dir=my_conf)
    assert (settings.mixer.target, settings.experiment, settings.train.num_steps) == ("my_mixers.Mine", "mine", 7)
    assert {"my_mixers.Mine"} == TRUSTED
    assert compose(["experiment=mine", "train.num_epochs=2"], config_dir=my_conf).train.num_steps is None
    with pytest.raises(UserError, match="attn=mine: unknown; there is "):
        compose(["attn=mine"])
    with pytest.raises(UserError, match="config_dir=nowhere: there is no such folder"):
        compose(config_dir="nowhere")


def test_no_evaluation_is_an_empty_list() -> None:
    with pytest.raises(UserError, match=r"^eval=null: must be a list of names; eval=\[\] is none$"):
        compose(["eval=null"])
    assert compose(["eval=[]"]).evaluations == []


def test_a_study_may_be_named_by_a_number_in_quotes() -> None:
    with pytest.raises(UserError, match=r"^experiment=20261129: a number where a name is expected; .*'experiment=\"20"):
        compose(["experiment=20261129", "device=cpu"])
    assert compose(['experiment="20261129"', "device=cpu"]).experiment == "20261129"


def test_a_home_folder_that_nobody_knows_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^~nobody-of-this-name/conf: no home folder is known"):
        compose(config_dir="~nobody-of-this-name/conf")


def test_a_program_that_uses_hydra_itself_keeps_its_own_yamls(
    my_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "mine")
    monkeypatch.syspath_prepend(my_conf.parent)
    (tmp_path / "train.yaml").write_text("lr: ${oc.env:MINE}\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        assert compose(["attn=linear", *DEMO]).mixer.name == "linear"
        assert compose(["attn=mine", "device=cpu"], config_dir=my_conf).mixer.name == "mine"
        with pytest.raises(UserError, match="attn=nope: unknown"):
            compose(["attn=nope"])
        assert compose_hydra("train").lr == "mine"
        assert not hydra.version.base_at_least("1.3")


def test_a_length_on_the_command_line_replaces_the_other_of_a_yaml() -> None:
    train = compose([*DEMO, "train.num_steps=5"]).train
    assert (train.num_steps, train.num_epochs) == (5, None)
    assert compose([*DEMO, "train.num_steps=null"]).train.num_epochs == 4
    with pytest.raises(UserError, match=r"train.num_epochs=3, train.num_steps=5, .*: set one, the others null"):
        compose([*DEMO, "train.num_steps=5", "train.num_epochs=3"])


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes_under_its_name(experiment: str) -> None:
    assert compose([f"experiment={experiment}", "device=cpu"]).experiment == experiment


def test_a_study_of_ones_own_needs_no_yaml(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        own = compose(["experiment=warmups", "device=cpu"])
    assert own == replace(compose(["device=cpu"]), experiment="warmups")
    # One that was meant is not taken for one without a word.
    assert "experiment=warmups: no yaml of experiment/ (there is demo, laptop)" in caplog.text


GROUPS = {
    "bench": {"bench"},
    "compare": {"logger", "plan"},
    "doctor": set(),
    "evaluate": {"eval"},
    "export": set(),
    "findings": {"finding"},
    "generate": set(),
    "runs": set(),
    "train": {"attn", "data", "eval", "experiment", "logger", "model", "recipe", "train"},
}
SHOWN = {"train": ["eval=[throughput,memory,copy,recall,perplexity,inference]"], "bench": ["bench=decode"]}
"""More of a script's settings that is looked at."""


@pytest.mark.parametrize("script", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_help_lists_the_groups_there_are_and_explains_every_setting(script: str, tmp_path: Path) -> None:
    code, said, _ = run_here(script, *SHOWN.get(script, []), "--help")
    assert code == 0
    before, _, shown = said.partition("and their values by this command line:")
    _, _, groups = before.partition("Groups (group=option):")
    assert set(re.findall(r"^(\w+): ", groups, re.MULTILINE)) == GROUPS[script]
    # The settings are a yaml, but for what some scripts say below them.
    path = tmp_path / "shown.yaml"
    path.write_text(shown.partition("\nRepeat the command")[0])
    values, comments = yaml.safe_load(path.read_text()), read_comments(path)
    names = {place for place in leaves(values) if place[:2] != ("plan", "variants") and place[-1] != "_target_"}
    # The entries of a mapping, as recall's budgets, have one comment together.
    assert not {place for place in names if place not in comments and (len(place) < 4 or place[:3] not in comments)}
    assert len(names) > 2


def leaves(values: dict, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the settings of a nested configuration."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*place, name))
        else:
            yield (*place, name)


def test_help_shows_what_a_yaml_of_ones_own_says(my_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (my_conf / "attn" / "shown.yaml").write_text(
        "# A mixer of mine: $5.\n_target_: my_mixers.Mine\nbackend: auto # torch is all\n# many a tap\nconv_size: 3\n"
    )
    code, said, _ = run_here("train.py", "--config-dir", str(my_conf), "attn=shown", "attn.conv_size=5", "--help")
    assert code == 0
    known = sorted({path.stem for folder in (CONF, my_conf) for path in (folder / "attn").glob("*.yaml")})
    assert {"linear", "mine", "shown"} < set(known)
    assert f"attn: {', '.join(known)} " in " ".join(said.split())
    assert "\nattn:  # A mixer of mine: $5.\n  _target_: my_mixers.Mine\n  backend: auto  # torch is all\n" in said
    assert "\n  conv_size: 5  # many a tap\n" in said


def test_an_evaluation_of_no_kind_is_an_error_that_says_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.yaml").write_text("# @package eval.mine\n_target_: my_evals.Mine\n")
    (tmp_path / "my_evals.py").write_text(
        "from attnbench.evals.base import Evaluation\n\n\nclass Mine(Evaluation):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--config-dir", str(tmp_path), *DEMO, "eval=mine", f"outputs_dir={tmp_path}"]
    code, _, errors = run_here("train.py", *words)
    assert code == 1
    assert "eval.mine: Mine must be one of CheckpointEvaluation, Probe, SystemEvaluation" in errors


@pytest.mark.parametrize(
    ("script", "group", "header"),
    [("train.py", "attn", ""), ("train.py", "eval", "# @package eval.mine\n"), ("benchmark.py", "bench", "")],
)
@pytest.mark.parametrize("content", ["backend: auto\n", "target: my_mixers.Mine\n", "_target_:\n"])
def test_a_yaml_without_its_class_is_named(script: str, group: str, header: str, content: str, tmp_path: Path) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(header + content)
    code, _, errors = run_here(script, "--config-dir", str(tmp_path), f"{group}=mine", f"outputs_dir={tmp_path}")
    assert code == 1
    word = "eval.mine" if group == "eval" else f"{group}=mine"
    assert errors == f"error: {word}: names no class; {group}/mine.yaml needs the line _target_: PACKAGE.CLASS\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no module my_own; PYTHONPATH=FOLDER before the command finds my_own.py there"),
        (
            "import math\nimport einopps\n",
            "{}:2: an import fails (No module named 'einopps'); install it, or mend the l",
        ),
        ("from math import sinn\n", "{}:1: an import fails (cannot import name 'sinn' from 'math' "),
        ("import math\nclass Mine(\n", "{}:2: no Python ('(' was never closed)"),
        ("def mine(:\n", "{}:1: no Python (invalid syntax)"),
        ("class Mine:\n    width = heads\n", "cannot be imported: NameError: name 'heads' is not defined, at {}:2\n"),
        (
            "import json\nSIZES = json.loads('')\n",
            "cannot be imported: JSONDecodeError: Expecting value: line 1 column 1 (char 0), at {}:2\n",
        ),
        (
            "from attnbench.mixers.softmax import Softmax\nclass Mime(Softmax):\n    pass\n",
            "my_own has no Mixer of the name Mine (did you mean Mime?); it has Mime",
        ),
        ("", "my_own has no Mixer of the name Mine\n"),
    ],
)
def test_a_mixer_of_ones_own_that_cannot_be_imported_is_one_line(
    source: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_own.py"
    if source is not None:
        path.write_text(source)
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "mine.yaml").write_text("_target_: my_own.Mine\nbackend: auto\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own", raising=False)
    for script, words in (("train.py", [*DEMO, "attn=mine"]), ("doctor.py", ["mixers=[mine]", "device=cpu"])):
        code, _, errors = run_here(script, "--config-dir", str(tmp_path), *words, f"outputs_dir={tmp_path}")
        assert code == 1
        assert errors.count("\n") == 1, errors
        assert errors.startswith(f"error: _target_=my_own.Mine: {message.format(path)}")


@pytest.mark.parametrize("script", ["train.py", "doctor.py"])
def test_a_configuration_of_another_name_is_one_line(script):
    code, _, errors = run_here(script, "--config-name", "nothere")
    assert code == 1
    assert errors.startswith("error: --config-name nothere: unknown")
    assert errors.count("\n") == 1


def test_a_sweeps_values_are_shown_as_they_were_given():
    assert readable([r"attn.path=my_layer\:MyLayer", "seed=1"]) == ["attn.path=my_layer:MyLayer", "seed=1"]
