"""Every closed group of settings as a dataclass. Knows no torch, so that a bad configuration is refused at once.

The yaml files of conf/ hold the values; these classes hold the names, the types and what is allowed. Open groups
(attn, eval) are `_target_` yamls whose constructor signature is their schema: `MixerSettings` and
`EvaluationSettings` carry such a yaml.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

CONF = (Path(__file__).parents[1] / "conf").resolve()
"""The yamls: a link to conf/ in a checkout, a folder of the package where that is installed."""

SELECTION_SEED = 1_000_000
"""The first of the seeds that learning rates are chosen on. They are never scored: rows of them stand in no table."""

MAX_STEPS = 10**8 - 1
"""Longest training: the names of its checkpoints have eight digits."""

MAX_VARIANTS = 256
"""Largest number of variants of a plan, and of its learning rates."""

CONTROL_SHIFT = 50
"""Shift of the seeds of a control: the reference of a plan under other seeds."""

LOOKS = {5: 0.005, 10: 0.015, 20: 0.03}
"""Seeds after which plan.seeds=auto looks at the scores, and the error of the family that each look may spend."""

MAX_CORPORA = 16
"""Largest number of corpora in one plan."""

MAX_PAIRED = 6
"""Largest number of variants compared pair by pair; more are compared with a reference alone."""

FEW_SEEDS = 4
"""Largest number of seeds up to which scores that are not tested are shown seed by seed."""


def setting(default: Any = MISSING, **allowed: Any) -> Any:
    """Return a dataclass field with the values that it allows, as in `check_value`: minimum=1, or choices=(...)."""
    return field(default=default, metadata=allowed)


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """Size of the model. `feed_forward_width` is softmax's; matching solves it for every other mixer."""

    name: str
    dim: int = setting(minimum=1, maximum=2**16)
    num_layers: int = setting(minimum=1, maximum=2**10)
    head_width: int = setting(minimum=1, maximum=2**16)
    feed_forward_width: int = setting(minimum=0, maximum=2**20)
    """Hidden channels of the SwiGLU feed-forward; 0 leaves the feed-forward out."""
    parameters: int | None = None
    """Number with softmax at WikiText-2 v1's vocabulary of 284: a statement that a test recomputes, never an input."""
    initial_deviation: float | None = setting(None, above=0)
    """Standard deviation of the projections' weights; null: 0.02, GPT-2's."""
    dropout: float | None = setting(None, minimum=0, below=1)
    """Share of the elements of the embedding and of each branch of a language model that a training step drops; null
    is 0, none. Probes have none."""


TOKENIZERS = ("characters", "bytes", "bpe")


@dataclass(slots=True, kw_only=True)
class DataSettings:
    """Corpus that a model is trained on."""

    name: str
    """wikitext2, embedded, text, enwik8, text8, or OWNER/NAME of a data set on the Hugging Face Hub, or a folder laid
    out as one."""
    tokenizer: str = setting("characters", choices=TOKENIZERS)
    """A token is a character of the train split, a byte of UTF-8, or, with bpe, bytes that are often together."""
    config: str | None = None
    """Configuration of a data set on the Hub; null: the only one."""
    files: str | None = None
    """Files of a data set on the Hub, a name or pattern there; null: all of the configuration."""
    column: str = "text"
    """Column of a data set on the Hub that holds the text."""
    path: str | None = None
    """A folder of parquet files or, for `text`, a file or folder of .txt or parquet; null: the usual places."""
    vocabulary_size: int | None = setting(None, minimum=2, maximum=2**24)
    """Number of symbols that the embedding is padded to; null: the tokenizer's. With bpe, which needs it, the number of
    tokens that are learned."""
    validation_fraction: float = setting(0.05, above=0, maximum=0.5)
    test_fraction: float = setting(0.05, minimum=0, maximum=0.5)
    """Shares of the characters, cut from the end; used where the corpus comes without these splits. 0 leaves the test
    split empty."""


CORPORA = ("wikitext2", "embedded", "text", "enwik8", "text8")
"""Values of `DataSettings.name` that are no data set on the Hub."""


PRECISIONS = ("float32", "tf32", "bfloat16")
BENCH_PRECISIONS = ("auto", *PRECISIONS, "float16")
"""Precisions of operator tables; auto as in `TrainSettings.precision`."""


@dataclass(slots=True, kw_only=True)
class TrainSettings:
    """Length of a training, its optimizer, and its precision."""

    num_epochs: int | None = setting(None, minimum=1)
    num_steps: int | None = setting(None, minimum=1, maximum=MAX_STEPS)
    num_tokens: int | None = setting(None, minimum=1)
    """Tokens that are trained on, of as many passes as that takes; the last step is made whole. Exactly one of the
    three is given."""
    batch_size: int = setting(128, minimum=1)
    """Sequences per optimizer step."""
    micro_batch_size: int | None = setting(None, minimum=1)
    """Sequences per forward and backward pass; null: all at once. Changes the memory, not the result."""
    learning_rate: float = setting(2e-3, above=0)
    warmup_steps: int = setting(100, minimum=0)
    final_rate_fraction: float = setting(0.1, minimum=0, maximum=1)
    """The rate ends at this share of the learning rate."""
    decay_fraction: float | None = setting(None, above=0, maximum=0.5)
    """Share of the steps, at least 100, over which a constant rate falls in a line at the end; null: a cosine."""
    patience_validations: int | None = setting(None, minimum=1)
    """Validations in a row without a lower loss, after which the rate falls and the training ends; null: it goes on."""
    weight_decay: float = setting(0.1, minimum=0)
    beta1: float = setting(0.9, minimum=0, below=1)
    beta2: float = setting(0.95, minimum=0, below=1)
    clip_norm: float = setting(1.0, above=0)
    precision: str = setting("auto", choices=("auto", *PRECISIONS))
    """auto: bfloat16 on CUDA, float32 on a CPU."""
    compile: bool | None = None
    """null: on for CUDA, off for a CPU."""
    log_interval_steps: int = setting(10, minimum=1)
    validation_interval_steps: int | None = setting(None, minimum=1)
    """null: at the end of every epoch."""
    validation_characters: int | None = setting(None, minimum=2)
    """Number of the validation split's characters that are read, the first ones; null: all."""
    checkpoint_interval_seconds: float = setting(60.0, minimum=0)
    """A checkpoint is also written at every validation and when the run is interrupted."""


@dataclass(slots=True, kw_only=True)
class LoggerSettings:
    """Copies of the log in wandb. The JSON-lines log in the run's folder is written in every mode."""

    mode: str = setting("auto", choices=("auto", "online", "offline", "none"))
    """wandb's mode; auto: online if logged in and the server can be reached, otherwise offline."""
    project: str = "attnbench"
    entity: str | None = None
    name: str | None = None
    """Name of the run in wandb; null: as its folder. A comparison's trainings keep theirs."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in wandb, besides its mixer, model and corpus."""


@dataclass(slots=True, kw_only=True)
class MixerSettings:
    """A yaml of conf/attn: the class of the mixer and its options."""

    name: str
    """The name of the yaml, or of a plan's variant: what tables call it."""
    target: str
    options: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class EvaluationSettings:
    """A yaml of conf/eval: the class of the evaluation and its options."""

    name: str
    target: str
    options: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class RecipeSettings:
    """A yaml of conf/recipe: the parts around a mixer, asked of every mixer alike; see mixers/recipe.py.

    Each part is null (left as the mixer's yaml and a probe have it), `own` (as the mixer's yaml has it, whatever a
    probe wishes), or what the mixer's option of that name takes.
    """

    name: str
    rotary_theta: float | str | None = None
    """Also `none`, and `needed`: a base of 10,000 for mixers that have no order of their own."""
    conv_size: int | str | None = None
    qk_norm: bool | str | None = None
    """Also `needed`: for mixers whose recurrence would grow without it."""
    output_norm: bool | str | None = None
    """Also `needed`: for mixers whose output has no bound of its own."""
    output_gate: str | None = None


MATCHES = ("params", "flops", "state", "none")


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """One language-model training and the evaluations that follow it."""

    experiment: str
    mixer: MixerSettings
    model: ModelSettings
    data: DataSettings
    train: TrainSettings
    logger: LoggerSettings
    evaluations: list[EvaluationSettings]
    recipe: RecipeSettings | None = None
    """Parts around the mixer, by now among its options; null: its yaml and the probes' wishes."""
    named_options: list[str] = field(default_factory=list)
    """Options of the mixer that the command line, its experiment or its recipe names: they win over a probe's wishes,
    and those over the yaml of the mixer."""
    seq_len: int = setting(minimum=1, maximum=2**31 - 1)
    seed: int = setting(minimum=0, maximum=2**31 - 1)
    device: str
    """auto (CUDA where there is one, otherwise the CPU), cpu, cuda, or cuda:N."""
    outputs_dir: str
    rerun: bool = False
    """Train and measure again although a finished run of the same settings is there."""
    match: str = setting(choices=MATCHES)
    match_by: str = setting("feed_forward", choices=("feed_forward", "layers"))
    """Solved by match=params and match=flops: the feed-forward's width, or the number of layers of the language model;
    probes keep their layers."""


@dataclass(slots=True, kw_only=True)
class PlanSettings:
    """Comparison of variants × evaluations × seeds."""

    name: str
    """The name of the yaml, and of the folder under outputs/."""
    overrides: list[str]
    """Beginning of every variant's command line, as attnbench train takes it."""
    variants: dict[str, list[str]] = field(metadata={"distinct": True, "most": MAX_VARIANTS})
    """Name to the rest of its command line: {softmax_conv: [attn=softmax, attn.conv_size=4]}."""
    factors: dict[str, list[str]] = field(default_factory=dict)
    """Part to its two levels, each a word of a command line; of a factorial plan, whose yaml names the variants without
    them, and whose `variants` here are those at every corner."""
    fraction: str = setting("full", choices=("full", "half"))
    """Corners of a factorial: all, or half of them."""
    corpora: list[str] | None = field(default=None, metadata={"distinct": True, "most": MAX_CORPORA})
    """Names of conf/data: language models are trained and evaluated on each, with verdicts of each; null: the one that
    the overrides name."""
    evaluations: list[str] = field(metadata={"distinct": True})
    """Names of conf/eval, in the order in which they are run."""
    only: list[str] | None = None
    """Some of `evaluations`, where the others are not wanted now."""
    seeds: list[int] = field(metadata={"distinct": True, "minimum": 0, "below": SELECTION_SEED})
    """Seeds of language models."""
    probe_seeds: list[int] = field(metadata={"distinct": True, "minimum": 0, "below": SELECTION_SEED})
    in_looks: bool = False
    """Set by plan.seeds=auto: of `seeds` and `probe_seeds`, the most that any look has, the first alone are scored, and
    more where a pair is undecided; see LOOKS."""
    learning_rates: list[float] | None = field(metadata={"distinct": True, "most": MAX_VARIANTS, "above": 0})
    """Grid of language models; one value is no search; null: each variant's own train.learning_rate. A probe's grid
    stands in the probe's yaml."""
    num_search_seeds: int = setting(3, minimum=1, maximum=100)
    """Seeds that learning rates are searched with, SELECTION_SEED and up."""
    rank: list[str] | None = None
    """The variants that are tested; null: all; none: every number is descriptive."""
    tested: list[str] | None = None
    """The evaluations whose primary metric is tested, the others being descriptive; null: all."""
    reference: str | None = None
    """Variant that each is compared with, and that runs again under other seeds as a control; null: all pairs."""
    num_workers: int = setting(1, minimum=1)
    """Number of cells at a time on a device; timed ones run alone on theirs."""
    devices: str = setting("one", choices=("one", "all"))
    """The device that `device` names, or all GPUs of the host, each with `num_workers` processes."""
    stack: int | None = setting(1, minimum=1, maximum=1000)
    """Trainings of a probe that differ in seed and learning rate alone and make each step together; None, the plan's
    auto: by what was measured on such a device, see comparison/stacks.py."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds that a cell of an evaluation, or of `training`, takes: the first estimate of the time left."""
    dry_run: bool = False
    """List the cells, say how long they will take here, and stop."""

    @property
    def ranked(self) -> list[str]:
        """The variants that are tested."""
        return list(self.variants) if self.rank is None else self.rank

    def control_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Shift the seeds of an evaluation to those of the control; none where nothing is tested."""
        is_tested = self.reference is not None and self.ranked and len(seeds) > 1
        return [seed + CONTROL_SHIFT for seed in seeds] if is_tested else []


@dataclass(slots=True, kw_only=True)
class SlurmSettings:
    """Array job of launcher=slurm."""

    partition: str | None = None
    """Null: the cluster's default."""
    tasks: int = setting(8, minimum=1, maximum=1000)
    """Tasks of the array, each with a fixed part of the cells; what is timed is one task, on one node."""
    minutes: int = setting(600, minimum=3)
    """Limit of a task."""
    gpus: int = setting(0, minimum=0)
    """A task's."""
    cpus: int | None = setting(None, minimum=1)
    """A task's; null: as the cluster has it."""
    requeue: bool = True
    """A task that is preempted, loses its node, or reaches its limit begins again, without what is finished."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any other options of sbatch: {account: lab, mem: 32G}."""


@dataclass(slots=True, kw_only=True)
class ComparisonSettings:
    """A plan, and where and how it is carried out."""

    plan: PlanSettings
    logger: LoggerSettings
    outputs_dir: str
    device: str
    rerun: bool
    report: bool
    """Write the report at the end."""
    exported: str | None
    """File that gets the rows of all finished cells; nothing is run."""
    imported: str | None
    """File of such rows, made elsewhere, that are taken over first."""
    import_check: int = setting(0, minimum=0)
    """Number of the trainings that are taken over which run again here and are compared first."""
    freeze: bool = False
    """Write down what will be measured and judged, before anything is scored; nothing is run."""
    launcher: str = setting("local", choices=("local", "slurm"))
    """Where the cells run: in processes of this host, or as an array job of a Slurm cluster."""
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    wait: bool = True
    """False: submit to Slurm, or collect what it has finished, and leave."""
    command: str
    """Command line as typed."""


@dataclass(slots=True, kw_only=True)
class DoctorSettings:
    """Mixers that the doctor checks, and the device."""

    mixers: list | None
    """Names of yamls of attn/; None for all there are."""
    device: str
    outputs_dir: str
    quick: bool = False
    """Leave out all but the contract, the backend that auto chooses, in float32 at the usual shape, and first steps."""


@dataclass(slots=True, kw_only=True)
class BenchSettings:
    """A yaml of conf/bench, an operator table: its class and its options; and where and in what it is measured."""

    name: str
    target: str
    options: dict[str, Any]
    precision: str = setting(choices=BENCH_PRECISIONS)
    device: str
    outputs_dir: str
    rerun: bool
    """Measure again although complete cells are there."""
    command: str
    """Command line as typed."""


@dataclass(slots=True, kw_only=True)
class ExportSettings:
    """Folder that attnbench export makes of a run, for other libraries."""

    run: str
    format: str = setting(choices=("huggingface",))
    checkpoint: str = setting(choices=("final", "best"))
    to: str | None
    """Folder to make; null: one in the run's."""
    command: str
    """Command line as typed."""


@dataclass(slots=True, kw_only=True)
class GenerationSettings:
    """Text that attnbench generate writes: its model, its prompt, its sampling."""

    run: str
    checkpoint: str = setting(choices=("final", "best"))
    prompt: str | None
    prompt_file: str | None
    """Both null: standard input."""
    num_tokens: int = setting(minimum=1, maximum=2**24)
    num_samples: int = setting(minimum=1, maximum=2**16)
    temperature: float = setting(minimum=1e-6, besides=0)
    """0: the most likely token each time. Logits divided by less than the minimum may leave the range of float32."""
    top_k: int | None = setting(None, minimum=1)
    seed: int = setting(minimum=0, maximum=2**31 - 1)
    recompute: bool
    """Without states: all text is read again for every character."""
    backend: str | None
    """null: what the run was given."""
    device: str
