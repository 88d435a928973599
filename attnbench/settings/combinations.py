"""Rules for settings that must fit together: of a run, a plan, a launcher."""

from pathlib import Path

from attnbench.settings.check import check_name, check_outputs_dir, check_value, setting_of
from attnbench.settings.errors import UserError
from attnbench.settings.schema import (
    CONTROL_SHIFT,
    CORPORA,
    LOOKS,
    MAX_PAIRED,
    SELECTION_SEED,
    STATUSES,
    ClaimSettings,
    ComparisonSettings,
    ContrastSettings,
    PlanSettings,
    RunSettings,
    RunsSettings,
)

MIN_ORDERED = 5
"""Fewest seeds of an order: with three a side no p-value is below 0.05."""

LENGTHS = ("num_epochs", "num_steps", "num_tokens")
"""Settings of train of which exactly one is given."""

GIVEN_BY_PLANS = {
    "train.learning_rate": "its rates from plan.learning_rates",
    "seed": "its seeds from plan.seeds and plan.probe_seeds",
    "eval": "what it measures from plan.evaluations",
    "device": "device= beside plan=",
    "outputs_dir": "outputs_dir= beside plan=",
    "rerun": "rerun= beside plan=",
    "logger": "logger= beside plan=",
}
"""Settings that a plan's overrides may not name, and their source in a comparison."""


def check_names(settings: RunSettings) -> None:
    check_name("experiment", settings.experiment)
    check_name("attn", settings.mixer.name)
    check_name("model.name", settings.model.name)
    for evaluation in settings.evaluations:
        check_name("eval", evaluation.name)


def can_end_early(decay_fraction: float | None) -> bool:
    """Tell if a rate is constant over at least half of the steps, so that its decay can begin earlier."""
    return decay_fraction is not None and 0 < decay_fraction <= 0.5


def check_run(settings: RunSettings) -> None:
    check_names(settings)
    check_outputs_dir(settings.outputs_dir)
    train, data = settings.train, settings.data
    lengths = {name: getattr(train, name) for name in LENGTHS}
    if sum(length is not None for length in lengths.values()) != 1:
        named = ", ".join(f"train.{name}={'null' if length is None else length}" for name, length in lengths.items())
        raise UserError(f"{named}: set one, the others null")
    fraction = train.decay_fraction
    if train.patience_validations is not None and not can_end_early(fraction):
        raise UserError(
            f"train.patience_validations={train.patience_validations}: ends a constant rate early, and "
            f"train.decay_fraction={'null is a cosine over all steps' if fraction is None else fraction}; give one "
            "above 0 and at most 0.5, 0.2 say"
        )
    if train.micro_batch_size is not None and train.batch_size % train.micro_batch_size:
        raise UserError(
            f"train.micro_batch_size={train.micro_batch_size}: must divide train.batch_size={train.batch_size}"
        )
    if settings.seed >= SELECTION_SEED:
        raise UserError(
            f"seed={settings.seed}: those from {SELECTION_SEED} on are for searches of learning rates, and never scored"
        )
    is_hub = data.name not in CORPORA
    if is_hub and "/" not in data.name and not (data.name and Path(data.name).is_dir()):
        raise UserError(
            f"data.name={data.name}: must be one of {', '.join(CORPORA)}, or, with data=hub, OWNER/NAME of a data set "
            "on the Hugging Face Hub or a folder"
        )
    if is_hub and data.path is not None:
        raise UserError(f"data.path={data.path}: data=hub reads data.name={data.name}; leave it out, or use data=text")
    for name, usual in (("config", None), ("files", None), ("column", "text")):
        if not is_hub and getattr(data, name) != usual:
            raise UserError(f"data.{name}={getattr(data, name)}: data.name={data.name} has none; only data=hub has")
    if data.name == "text" and data.path is None:
        raise UserError("data.path=null: data=text needs a .txt or parquet file, or a folder of them")
    if data.tokenizer == "bpe" and data.vocabulary_size is None:
        raise UserError("data.vocabulary_size=null: with data.tokenizer=bpe give the number of tokens, 8192 say")
    if data.tokenizer != "characters" and data.vocabulary_size is not None and data.vocabulary_size < 256:
        raise UserError(
            f"data.vocabulary_size={data.vocabulary_size}: data.tokenizer={data.tokenizer} has 256 at least"
        )
    if data.validation_fraction + data.test_fraction > 0.9:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} and data.test_fraction={data.test_fraction}: "
            "together at most 0.9, so that something is left to train on"
        )


def check_launcher(settings: ComparisonSettings) -> None:
    if settings.launcher == "local":
        if not settings.wait:
            raise UserError("wait=false: needs launcher=slurm; what runs on this host ends with the command")
        return
    if settings.device == "auto":
        raise UserError("device=auto: with launcher=slurm name it, device=cpu or device=cuda: this host may be another")
    if settings.device != "cpu" and settings.slurm.gpus == 0:
        raise UserError(f"slurm.gpus=0: with device={settings.device} a task needs one; slurm.gpus=1")
    if settings.rerun and not settings.wait:
        raise UserError("wait=false: with rerun=true nothing says which cells are this time's; wait for them")


def _check_claim(plan: PlanSettings, claim: ClaimSettings) -> None:
    where = f"{plan.name}: claim"
    check_value(f"{where}.minutes", list(claim.minutes), kind=list[str], choices=("cpu", "cuda"))
    if not claim.contrasts:
        raise UserError(f"{where}.contrasts: a claim has at least one")
    others = [it for it in claim.differences if claim.tier != "exact" or not it.startswith(("device", "seeds"))]
    if (claim.tier == "exact") == bool(others):
        asked = "none but device and seeds" if claim.tier == "exact" else "all differences from the source"
        raise UserError(f"{where}.differences={claim.differences}: tier={claim.tier} lists {asked}")
    for index, control in enumerate(claim.controls):
        at = f"{where}.controls[{index}]"
        check_value(f"{at}.variant", control.variant, choices=plan.variants)
        check_value(f"{at}.least", control.least, maximum=control.seeds)
    for index, contrast in enumerate(claim.contrasts):
        at = f"{where}.contrasts[{index}]"
        check_value(f"{at}.variants", contrast.variants, choices=plan.variants)
        check_value(f"{at}.evaluation", contrast.evaluation, choices=plan.evaluations)
        if contrast.evaluation is None and len(plan.evaluations) > 1:
            raise UserError(f"{at}.evaluation: must be one of {', '.join(plan.evaluations)}")
        if contrast.kind == "order" and min(len(plan.seeds), len(plan.probe_seeds)) < MIN_ORDERED:
            raise UserError(f"{at}: kind=order takes at least {MIN_ORDERED} seeds")
        _check_contrast(at, contrast)


def _check_contrast(where: str, contrast: ContrastSettings) -> None:
    kind, number = contrast.kind, 2 if contrast.kind in ("difference", "order") else 1
    if len(contrast.variants) != number:
        raise UserError(f"{where}.variants={contrast.variants}: kind={kind} takes {number}")
    needed = {
        "threshold": kind in ("existence", "difference", "best_of"),
        "published": kind == "value",
        "margin": kind == "value",
    }
    for name, is_needed in needed.items():
        if is_needed != (getattr(contrast, name) is not None):
            raise UserError(
                f"{where}.{name}={getattr(contrast, name)}: kind={kind} takes {'one' if is_needed else 'null'}"
            )
    if contrast.threshold is not None and (contrast.scaled or contrast.metric.endswith("accuracy")):
        check_value(f"{where}.threshold", contrast.threshold, maximum=1)
    if not contrast.claimed and kind != "existence":
        raise UserError(f"{where}.claimed=false: kind={kind} takes true")


def _check_corpora(plan: PlanSettings) -> None:
    if plan.corpora is None:
        return
    for corpus in plan.corpora:
        check_name("plan.corpora", corpus)
    for where, words in (("plan.overrides", plan.overrides), *plan.variants.items()):
        for word in words:
            if setting_of(word).split(".")[0] == "data":
                raise UserError(f"{where}: {word} beside plan.corpora: a corpus is a yaml of data/, named there alone")
    if plan.factors and len(plan.corpora) > 1:
        raise UserError(f"plan.corpora={plan.corpora}: a factorial has one corpus; give it a plan for each")


def check_plan(plan: PlanSettings) -> None:
    check_name("plan.name", plan.name)
    for variant, words in plan.variants.items():
        check_name("plan.variants", variant)
        if not any(word.startswith("attn=") for word in words):
            raise UserError(f"plan.variants.{variant}={words}: must be a list of overrides with attn=NAME among them")
    for where, words in (("plan.overrides", plan.overrides), *plan.variants.items()):
        for word in words:
            source = GIVEN_BY_PLANS.get(setting_of(word))
            is_own_rate = setting_of(word) == "train.learning_rate" and plan.learning_rates is None
            if source is not None and not is_own_rate:
                raise UserError(f"{where}: {word} would count for nothing; a comparison takes {source}")
    check_value("plan.only", plan.only, choices=plan.evaluations)
    _check_corpora(plan)
    if plan.claim is not None:
        _check_claim(plan, plan.claim)
    check_value("plan.rank", plan.rank, choices=plan.variants)
    check_value("plan.reference", plan.reference, choices=plan.variants)
    if not set(plan.tested or []) <= set(plan.evaluations):
        raise UserError(
            f"plan.tested={plan.tested}: must be among plan.evaluations={plan.evaluations}; plan.tested=null tests all"
        )
    if plan.reference is not None and plan.rank and plan.reference not in plan.rank:
        raise UserError(f"plan.reference={plan.reference}: must be one of plan.rank={plan.rank}, or null")
    if plan.in_looks:
        most = list(range(max(LOOKS)))
        if plan.seeds != most or plan.probe_seeds != most:
            raise UserError("plan.in_looks=true: is set by plan.seeds=auto, which also gives the seeds")
        if not plan.ranked:
            raise UserError("plan.seeds=auto: with plan.rank=[] nothing is tested, and no pair asks for more seeds")
    seeds = {*plan.seeds, *plan.probe_seeds}
    both = sorted(seeds & {*plan.control_seeds(plan.seeds), *plan.control_seeds(plan.probe_seeds)})
    if both:
        raise UserError(
            f"plan.seeds: {both[0]} is seed {both[0] - CONTROL_SHIFT} of the control, whose seeds are shifted by "
            f"{CONTROL_SHIFT}; take seeds within a range of {CONTROL_SHIFT}"
        )
    if len(plan.ranked) > MAX_PAIRED and plan.reference is None:
        raise UserError(
            f"plan.reference=null: with more than {MAX_PAIRED} variants under plan.rank name the one to compare with"
        )


def check_runs(settings: RunsSettings) -> None:
    for status in settings.filters().get("status", []):
        if status not in STATUSES:
            raise UserError(f"status={status}: must be one of {', '.join(STATUSES)}")
    if settings.compare is not None and len(settings.compare) < 2:
        raise UserError(f"compare={settings.compare}: must name two runs or more, compare=[A,B]")
