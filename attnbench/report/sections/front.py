"""The first screen: who is better, all scores, one chart of differences and one of score against cost."""

from collections.abc import Sequence
from dataclasses import replace

from attnbench.report.blocks import Block, Note, Picture, Pictures, Scores, Section, Sentences
from attnbench.report.inputs import Inputs
from attnbench.report.sections import words
from attnbench.report.sections.answer import UNFINISHED, seed_lines, unscored_reason
from attnbench.report.sections.differences import difference_picture, seed_picture
from attnbench.report.sections.scores import score_table, signs_note
from attnbench.report.sections.surroundings import EQUAL, equal_parts
from attnbench.report.sections.tradeoffs import cost_pictures
from attnbench.report.sections.verdicts import first_sentences
from attnbench.results.corpora import split_name
from attnbench.results.rows import TRAINING
from attnbench.verdict.ranking import common_reference
from attnbench.verdict.seeds import is_accuracy, same_models
from attnbench.verdict.summary import Summary, summary

MANY_SCORES = 9
"""Most columns of the table of the first screen; with more, each metric of an evaluation has one, its hardest."""


def front(inputs: Inputs, notes: Sequence[Block]) -> Section:
    said, scores = first_answer(inputs)
    unfinished = [Note(UNFINISHED, kind="callout")] if inputs.protocol.missing else []
    lead = [Note(scores.table.lead, kind="callout")] if scores.table.lead else []
    scores = replace(scores, table=replace(scores.table, lead=""))
    pictures = front_pictures(inputs)
    drawn = [Pictures(pictures)] if pictures else []
    equal = Note(equal_parts(inputs.rows, inputs.figures, inputs.protocol.rates), kind="note wide", heading=EQUAL)
    blocks: list[Block] = [*unfinished, Sentences(said), equal, scores, *lead, *drawn, *notes]
    return Section(title="The answer", blocks=blocks, is_first=True)


def first_answer(inputs: Inputs) -> tuple[list[str], Scores]:
    """Return the sentences of the first screen and its table."""
    verdicts = inputs.verdicts
    content = narrowed(summary(inputs.figures, verdicts, inputs.protocol.variants))
    untested = inputs.protocol.descriptive or [unscored_reason(inputs)]
    said = first_sentences(verdicts) if verdicts else [*untested, *seed_lines(inputs)]
    table = score_table(content, with_seeds=not verdicts)
    shown = [it.figure for line in content.lines.values() for it in line if it.figure and not verdicts]
    of_few = any(it.is_of_few and is_accuracy(it.metric) for it in shown)
    in_seeds = ["In parentheses: the seeds of a mean."] if of_few else []
    same = (f"{line}: one model, run once." for line in same_models(inputs.protocol.shared))
    return said, Scores(table, " ".join([signs_note(content, common_reference(verdicts)), *in_seeds, *same]))


def narrowed(content: Summary) -> Summary:
    """Leave out columns without a number and, where there are many, those of one metric with easier settings."""
    columns = list(zip(*content.lines.values(), strict=True))
    kept = [n for n, entries in enumerate(columns) if any(it.figure and it.figure.mean is not None for it in entries)]
    if len(kept) > MANY_SCORES:
        last = {(content.columns[index].evaluation, content.columns[index].metric): index for index in kept}
        kept = sorted(last.values())
    kept = kept or list(range(len(content.columns)))
    lines = {variant: [entries[index] for index in kept] for variant, entries in content.lines.items()}
    return Summary(columns=[content.columns[index] for index in kept], lines=lines)


def front_pictures(inputs: Inputs) -> list[Picture]:
    """Language models come before probes."""
    variants, known = inputs.protocol.variants, inputs.primaries
    in_order = sorted(known, key=lambda name: known[name].kind != "nats")
    found = (
        difference_picture([it for it in inputs.verdicts if it.pair.evaluation == name], variants)
        or seed_picture(name, known[name], inputs.figures, variants)
        for name in in_order
    )
    scores = next((picture for picture in found if picture is not None), None)
    priced = cost_pictures(inputs.rows, inputs.figures, {name: known[name] for name in in_order}, variants)[0]
    return [picture for picture in (scores, *priced[:1]) if picture is not None]


def facts(inputs: Inputs) -> list[str]:
    """Variants, parameters, data, steps, seeds, device, minutes."""
    protocol, identities = inputs.protocol, [row.identity for row in inputs.rows]
    num_seeds = max((len(figure.values) for figure in inputs.figures), default=0)
    of_text = [it for it in identities if split_name(it.evaluation)[0] in (TRAINING, "perplexity")]
    sizes = [it.parameters for it in of_text or identities if it.parameters]
    model = " (language model)" * bool(of_text)
    corpora = [*dict.fromkeys(words.corpus_name(it.corpus) for it in identities if it.corpus)]
    evaluations = {split_name(it.evaluation)[0] for it in identities} - {TRAINING}
    return [
        _counted(len(protocol.variants), "variant"),
        *([_counted(len(evaluations), "evaluation")] if evaluations else []),
        *([f"{_sizes(min(sizes), max(sizes))} parameters{model}{_timed_size(inputs)}"] if sizes else []),
        *([words.listed(corpora) if len(corpora) < 3 else f"{len(corpora)} corpora"] if corpora else []),
        *([protocol.trained] if protocol.trained else []),
        f"up to {_counted(num_seeds, 'seed')}" if num_seeds > 1 else "1 seed",
        words.devices(it.device for it in identities),
        *([_minutes(protocol.seconds)] if protocol.seconds else []),
    ]


def _timed_size(inputs: Inputs) -> str:
    """Name the largest model that scaling times, whose time is in the table: ", 0.71 M (model 1m)"."""
    of_it = [it for it in inputs.figures if it.metric == "parameters" and "model" in it.settings]
    size, name = max(((round(it.mean), it.settings["model"]) for it in of_it if it.mean), default=(0, ""))
    return f", {_sizes(size, size)} (model {name})" if size else ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sizes(least: int, most: int) -> str:
    ends = [
        f"{it / 1e6:,.0f} M" if it >= 9.95e6 else f"{it / 1e6:.2g} M" if it >= 1e5 else f"{it:,}"
        for it in (least, most)
    ]
    return ends[0] if ends[0] == ends[1] else f"{ends[0].removesuffix(' M')} to {ends[1]}"


def _minutes(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours >= 2 else _counted(max(1, round(seconds / 60)), "minute")
