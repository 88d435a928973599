"""Every closed group of settings as a dataclass: names, types and allowed values; the yamls of conf/ have the values.

Open groups (attn, eval, bench) are `_target_` yamls with the signature of a constructor as schema. The comments in the
yamls, which --help shows, explain the fields. Without torch, so that a wrong configuration is refused at once.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

CONF = (Path(__file__).parents[1] / "conf").resolve()
"""The yamls: a link to conf/ in a checkout, a folder of an installed package."""

SELECTION_SEED = 1_000_000
"""The first seed for choosing learning rates; such seeds are never scored."""

MAX_STEPS = 10**8 - 1
"""Longest training: names of checkpoints have eight digits."""

MAX_VARIANTS = 256
"""Largest number of variants, and of learning rates, of a plan."""

CONTROL_SHIFT = 50
"""Shift of the seeds of a control, the reference under other seeds."""

LOOKS = {5: 0.005, 10: 0.015, 20: 0.03}
"""Numbers of seeds at which plan.seeds=auto looks at the scores, and the family-wise error of each look."""

MAX_CORPORA = 16

MAX_PAIRED = 6
"""Largest number of variants compared pair by pair; more are compared with a reference."""

FEW_SEEDS = 4
"""Largest number of seeds whose untested scores are shown seed by seed."""


FINDINGS = "findings"
"""Name of the findings' table, and of their folder under outputs/."""


def setting(default: Any = MISSING, **allowed: Any) -> Any:
    """Declare a field with the allowed values of `check_value`: minimum=1, or choices=(...)."""
    return field(default=default, metadata=allowed)


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """Size of the model; `feed_forward_width` is softmax's, matching solves it for other mixers."""

    name: str
    dim: int = setting(minimum=1, maximum=2**16)
    num_layers: int = setting(minimum=1, maximum=2**10)
    head_width: int = setting(minimum=1, maximum=2**16)
    feed_forward_width: int = setting(minimum=0, maximum=2**20)
    parameters: int | None = None
    """With softmax and WikiText-2 v1's vocabulary of 284; informative."""
    initial_deviation: float | None = setting(None, above=0)
    dropout: float | None = setting(None, minimum=0, below=1)
    norm: str | None = setting(None, choices=("layer",))
    """Norm of the residual stream; None: RMS norm."""
    untied: bool = False
    """The logits have weights of their own, not those of the embedding."""
    dropout_of: str | None = setting(None, choices=("embedding",))
    """Place of the dropout; None: the embedding and every branch."""
    doubled_residual: bool = False
    """A block without feed-forward ends with x + norm(x)."""


TOKENIZERS = ("characters", "bytes", "bpe")


@dataclass(slots=True, kw_only=True)
class DataSettings:
    name: str
    """One of CORPORA, OWNER/NAME on the Hugging Face Hub, or a folder laid out like a data set there."""
    tokenizer: str = setting("characters", choices=TOKENIZERS)
    config: str | None = None
    files: str | None = None
    column: str = "text"
    path: str | None = None
    vocabulary_size: int | None = setting(None, minimum=2, maximum=2**24)
    """Symbols to which the embedding is padded, null: the tokenizer's; with bpe the tokens to learn."""
    validation_fraction: float = setting(0.05, above=0, maximum=0.5)
    test_fraction: float = setting(0.05, minimum=0, maximum=0.5)
    """Shares of the characters, cut from the end if the corpus has no such splits; 0: no test split."""


CORPORA = ("wikitext2", "embedded", "text", "books", "enwik8", "text8")
"""Values of data.name that are no data set on the Hub."""


PRECISIONS = ("float32", "tf32", "bfloat16")
BFLOAT16_WEIGHTS = "bfloat16_weights"
"""Weights, gradients and moments are in bfloat16 too. For probes, as some published ones train."""
BENCH_PRECISIONS = ("auto", *PRECISIONS, "float16")


@dataclass(slots=True, kw_only=True)
class TrainSettings:
    num_epochs: int | None = setting(None, minimum=1)
    num_steps: int | None = setting(None, minimum=1, maximum=MAX_STEPS)
    num_tokens: int | None = setting(None, minimum=1)
    """Tokens to train on, rounded up to whole steps. Exactly one of the three is given."""
    batch_size: int = setting(128, minimum=1)
    micro_batch_size: int | None = setting(None, minimum=1)
    learning_rate: float = setting(2e-3, above=0)
    warmup_steps: int = setting(100, minimum=0)
    final_rate_fraction: float = setting(0.1, minimum=0, maximum=1)
    decay_fraction: float | None = setting(None, minimum=0, maximum=1)
    rate_interval_steps: int | None = setting(None, minimum=1)
    patience_validations: int | None = setting(None, minimum=1)
    weight_decay: float = setting(0.1, minimum=0)
    beta1: float = setting(0.9, minimum=0, below=1)
    beta2: float = setting(0.95, minimum=0, below=1)
    epsilon: float | None = setting(None, above=0)
    clip_norm: float = setting(1.0, minimum=0)
    precision: str = setting("auto", choices=("auto", *PRECISIONS))
    compile: bool | None = None
    log_interval_steps: int = setting(10, minimum=1)
    validation_interval_steps: int | None = setting(None, minimum=1)
    validation_characters: int | None = setting(None, minimum=2)
    checkpoint_interval_seconds: float = setting(60.0, minimum=0)


@dataclass(slots=True, kw_only=True)
class LoggerSettings:
    """Copy of the log in wandb; the run's folder always has its log."""

    mode: str = setting("auto", choices=("auto", "online", "offline", "none"))
    project: str = "attnbench"
    entity: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class MixerSettings:
    """A yaml of conf/attn: the class of the mixer and its options."""

    name: str
    """Name of the yaml or of a plan's variant, for tables."""
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
    """A yaml of conf/recipe: the same parts around every mixer; see mixers/recipe.py.

    A part is null (as the mixer's yaml and a probe have it), `own` (as the mixer's yaml has it), or a value of the
    mixer's option of that name.
    """

    name: str
    rotary_theta: float | str | None = None
    conv_size: int | str | None = None
    qk_norm: bool | str | None = None
    output_norm: bool | str | None = None
    output_gate: str | None = None


MATCHES = ("params", "flops", "state", "none")


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """One language-model training and its evaluations."""

    experiment: str
    mixer: MixerSettings
    model: ModelSettings
    data: DataSettings
    train: TrainSettings
    logger: LoggerSettings
    evaluations: list[EvaluationSettings]
    recipe: RecipeSettings | None = None
    """Already applied to the mixer's options."""
    named_options: list[str] = field(default_factory=list)
    """Options of the mixer named by the command line, its experiment or its recipe: they override a probe's options,
    which override the mixer's yaml."""
    seq_len: int = setting(minimum=1, maximum=2**31 - 1)
    seed: int = setting(minimum=0, maximum=2**31 - 1)
    device: str
    outputs_dir: str
    rerun: bool = False
    match: str = setting(choices=MATCHES)


CONTRASTS = ("existence", "difference", "best_of", "value", "order")

TIERS = ("exact", "close", "reduced")


@dataclass(slots=True, kw_only=True)
class ControlSettings:
    """Positive control of a claim: a variant that learns the task if the setting is right.

    At its chosen rate at least `least` of `seeds` search seeds reach `threshold` on validation data of trained
    lengths.
    """

    variant: str
    threshold: float = setting(above=0, maximum=1)
    scaled: bool = False
    seeds: int = setting(3, minimum=1, maximum=100)
    least: int = setting(2, minimum=1, maximum=100)


@dataclass(slots=True, kw_only=True)
class ContrastSettings:
    """One test of a claim, by its kind; see verdict/claims.py."""

    kind: str = setting(choices=CONTRASTS)
    variants: list[str] = field(metadata={"distinct": True})
    """A difference and an order have two: the first is claimed to solve the task more often, or to score higher."""
    evaluation: str | None = None
    """Evaluation with the metric; null: the plan's only one."""
    metric: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the row, {"length": 100}."""
    scaled: bool = False
    """Scores are (a - chance) / (1 - chance)."""
    threshold: float | None = setting(None, above=0)
    claimed: bool = True
    """false, of an existence: the source says that the variant does not learn it."""
    best: int = setting(3, minimum=1)
    """Number of seeds of which the source shows the best, for kind best_of."""
    published: float | None = None
    margin: float | None = setting(None, above=0)


@dataclass(slots=True, kw_only=True)
class ClaimSettings:
    """Published claim that a plan tests."""

    statement: str
    source: str
    """arXiv id and table."""
    tier: str = setting(choices=TIERS)
    differences: list[str] = field(default_factory=list)
    """All differences from the source's setting; of tier exact none but device and seeds."""
    published: str
    """The source's numbers, in words."""
    source_samples: int | None = setting(None, minimum=1)
    """Strings or sequences of one training of the source; null: unknown."""
    disputed: str | None = None
    """How the source's versions, or two sources, contradict each other."""
    where: str | None = None
    """End of the reason of "not reproduced": in the released code's batch."""
    controls: list[ControlSettings] = field(default_factory=list)
    contrasts: list[ContrastSettings]
    trained_range: float | None = setting(None, above=0, maximum=1)
    """Lowest accuracy on validation data of trained lengths that two seeds of each extrapolating variant must reach."""
    minutes: dict[str, float | None]
    """Measured minutes by type of device; null: not measured. Another device is too slow."""
    needs: list[str] = field(default_factory=list)
    """Missing parts of attnbench, without which it cannot run."""


@dataclass(slots=True, kw_only=True)
class PlanSettings:
    """Comparison of variants × evaluations × seeds."""

    name: str
    overrides: list[str]
    """First words of every variant's command line, as for attnbench train."""
    variants: dict[str, list[str]] = field(metadata={"distinct": True, "most": MAX_VARIANTS})
    """Name to the rest of its command line: {softmax_conv: [attn=softmax, attn.conv_size=4]}."""
    factors: dict[str, list[str]] = field(default_factory=dict)
    """Parts of a factorial plan, each with its two levels, which are overrides; `variants` here has every corner."""
    fraction: str = setting("full", choices=("full", "half"))
    corpora: list[str] | None = field(default=None, metadata={"distinct": True, "most": MAX_CORPORA})
    evaluations: list[str] = field(metadata={"distinct": True})
    only: list[str] | None = None
    seeds: list[int] = field(metadata={"distinct": True, "minimum": 0, "below": SELECTION_SEED})
    probe_seeds: list[int] = field(metadata={"distinct": True, "minimum": 0, "below": SELECTION_SEED})
    in_looks: bool = False
    """Set by plan.seeds=auto: at first only some of `seeds` and `probe_seeds` are scored, see LOOKS."""
    learning_rates: list[float] | None = field(metadata={"distinct": True, "most": MAX_VARIANTS, "above": 0})
    """Grid of language models, null: each variant's train.learning_rate. A probe's yaml has the probe's grid."""
    num_search_seeds: int = setting(3, minimum=1, maximum=100)
    rank: list[str] | None = None
    tested: list[str] | None = None
    reference: str | None = None
    num_workers: int = setting(1, minimum=1)
    devices: str = setting("one", choices=("one", "all"))
    stack: int | None = setting(1, minimum=1, maximum=1000)
    """Trainings of a probe, with other seeds and rates, that share each step; None (auto): as measured on the
    device."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of a run of an evaluation, or of `training`, on some machine: those of finished runs scale them."""
    dry_run: bool = False
    claim: ClaimSettings | None = None
    """A plan with a claim is a finding, and ranks nothing."""

    @property
    def table(self) -> str:
        """Name under which docs/results/SEEDS books the scored seeds."""
        return self.name if self.claim is None else FINDINGS

    @property
    def unscored(self) -> set[str]:
        """Variants that are positive controls alone."""
        claim = self.claim
        contrasted = {name for it in claim.contrasts for name in it.variants} if claim is not None else set()
        return {it.variant for it in claim.controls} - contrasted if claim is not None else set()

    @property
    def ranked(self) -> list[str]:
        return list(self.variants) if self.rank is None else self.rank

    def control_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return the control's seeds; none if nothing is tested."""
        is_tested = self.reference is not None and self.ranked and len(seeds) > 1
        return [seed + CONTROL_SHIFT for seed in seeds] if is_tested else []


@dataclass(slots=True, kw_only=True)
class SlurmSettings:
    partition: str | None = None
    tasks: int = setting(8, minimum=1, maximum=1000)
    minutes: int = setting(600, minimum=3)
    gpus: int = setting(0, minimum=0)
    cpus: int | None = setting(None, minimum=1)
    requeue: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ComparisonSettings:
    plan: PlanSettings
    logger: LoggerSettings
    outputs_dir: str
    device: str
    rerun: bool
    report: bool
    exported: str | None
    """File for the rows of all finished runs; nothing runs."""
    imported: str | None
    """File of such rows, made elsewhere, to take over first."""
    freeze: bool = False
    launcher: str = setting("local", choices=("local", "slurm"))
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    wait: bool = True
    command: str
    """Command line as typed."""


@dataclass(slots=True, kw_only=True)
class DoctorSettings:
    mixers: list | None
    device: str
    outputs_dir: str
    quick: bool = False


@dataclass(slots=True, kw_only=True)
class BenchSettings:
    """A yaml of conf/bench, the class and options of an operator table; its device and precision."""

    name: str
    target: str
    options: dict[str, Any]
    precision: str = setting(choices=BENCH_PRECISIONS)
    device: str
    outputs_dir: str
    rerun: bool
    command: str


@dataclass(slots=True, kw_only=True)
class ExportSettings:
    run: str
    format: str = setting(choices=("huggingface",))
    checkpoint: str = setting(choices=("final", "best"))
    to: str | None
    command: str


@dataclass(slots=True, kw_only=True)
class GenerationSettings:
    run: str
    checkpoint: str = setting(choices=("final", "best"))
    prompt: str | None
    prompt_file: str | None
    """Both null: standard input."""
    num_tokens: int = setting(minimum=1, maximum=2**24)
    num_samples: int = setting(minimum=1, maximum=2**16)
    temperature: float = setting(minimum=1e-6, besides=0)
    """0: greedy. Logits divided by less than the minimum may overflow float32."""
    top_k: int | None = setting(None, minimum=1)
    seed: int = setting(minimum=0, maximum=2**31 - 1)
    backend: str | None
    device: str


STATUSES = ("finished", "unfinished", "failed", "running", "damaged")
"""States of a folder; damaged: its results cannot be read or were altered."""


@dataclass(slots=True, kw_only=True)
class RunsSettings:
    experiments: str | list[str] | None
    """Folders under outputs_dir; null: all."""
    variant: str | list[str] | None
    """Only these; null: all."""
    evaluation: str | list[str] | None
    """Only runs with results of these, or of `training`; null: all."""
    status: str | list[str] | None
    compare: list[str] | None
    """Runs, by path, name, or an unambiguous beginning of a name or hash."""
    all: bool
    """Show all scores and settings of the compared runs."""
    sort: str | None
    """A column, or a metric; with "-" before it the largest comes first."""
    outputs_dir: str

    def filters(self) -> dict[str, list[str]]:
        given = {name: getattr(self, name) for name in ("experiments", "variant", "evaluation", "status")}
        return {name: [it] if isinstance(it, str) else it for name, it in given.items() if it is not None}
