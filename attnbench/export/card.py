"""Model card of an exported run: model, use, scores, verdicts, licence."""

from collections.abc import Sequence
from pathlib import Path

from attnbench.model.stored import ModelRecord, tokenizer_of
from attnbench.report.inputs import read_inputs
from attnbench.report.sections.verdicts import verdict_lines
from attnbench.results.numbers import format_interval, format_number
from attnbench.results.rows import ResultRow
from attnbench.results.tables import Table, to_markdown
from attnbench.settings.escape import markdown_text, printable, without_paths
from attnbench.settings.hybrid import classes_of
from attnbench.settings.schema import ExportSettings, RunSettings
from attnbench.verdict.axes import axes
from attnbench.verdict.summary import primary_metrics

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [attnbench]
---
"""
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
inputs = tokenizer("the history of", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0]))
```

`trust_remote_code=True` runs the Python files of this folder: read them first. They are attnbench's, without its
kernels, and need torch and transformers (from version 5 on) alone. The model reads texts without padding, those of a
batch of one length. `generate` goes through the mixers' states, a step a token."""
LICENCE = "The code in this folder is attnbench's, under the MIT licence (LICENSE). The weights were trained on {}."
LICENCES = {
    "wikitext2": "WikiText-2, which is CC BY-SA 3.0 and GFDL (Merity et al., 2016)",
    "books@": "books in the public domain of the United States, in editions of Standard Ebooks, which are CC0 1.0",
}
"""The licence of a corpus, by the beginning of its label."""
OTHER = "{}, whose licence is for its owner to say"


def model_card(
    run: Path,
    trained: RunSettings,
    record: ModelRecord,
    rows: Sequence[ResultRow],
    settings: ExportSettings,
    num_parameters: int,
) -> str:
    corpus, tokenizer = markdown_text(record.corpus), tokenizer_of(record)
    others = " and one symbol for all others" if tokenizer.num_writable < tokenizer.size else ""
    model = [
        ["mixer", f"{trained.mixer.name}, as {classes_of(record.mixers)}, {len(record.mixers)} layers"],
        ["parameters", f"{num_parameters:,}"],
        ["width, feed-forward", f"{record.model.dim}, {record.model.feed_forward_width}"],
        ["tokenizer", f"{tokenizer.kind}: {tokenizer.num_writable:,} {tokenizer.units}{others}"],
        ["trained on", f"{record.corpus}, sequences of {record.seq_len} tokens, {record.precision}"],
        ["trained under", f"seed {trained.seed}, learning rate {trained.train.learning_rate:g}"],
        ["checkpoint", settings.checkpoint],
    ]
    known = (licence for label, licence in LICENCES.items() if record.corpus.startswith(label))
    licence = next(known, OTHER.format(corpus))
    verdicts = _verdicts(run, rows)
    parts = [
        f"# {markdown_text(run.name)}",
        "A language model that attnbench trained.",
        to_markdown(Table(headers=["", ""], lines=model, num_labels=2)),
        "## Use",
        USE,
        "## Scores",
        _scores(rows, settings.checkpoint),
        *(["## Verdicts", *verdicts] if verdicts else []),
        "## Licence",
        LICENCE.format(licence),
        "## Made by",
        f"    {printable(without_paths(settings.command))}",
    ]
    return HEAD + "\n" + "\n\n".join(parts) + "\n"


def _scores(rows: Sequence[ResultRow], checkpoint: str) -> str:
    known = primary_metrics(dict.fromkeys(row.identity.evaluation for row in rows))
    lines = []
    for row in rows:
        measured, primary = row.measurement, known.get(row.identity.evaluation)
        settings = measured.settings
        if primary is None or measured.metric != primary.metric or settings.get("checkpoint", checkpoint) != checkpoint:
            continue
        if not {name: it for name, it in primary.settings.items() if name != "checkpoint"}.items() <= settings.items():
            continue
        where = ", ".join(f"{name} {value}" for name, value in sorted(axes(settings).items()))
        value = f"{measured.status}: {measured.reason}" if measured.value is None else format_number(measured.value)
        interval = format_interval(measured.low, measured.high)
        lines.append([row.identity.evaluation, measured.metric, where, value, interval])
    if not lines:
        return "None was measured; results.csv has the rows of the training."
    table = Table(headers=["evaluation", "metric", "at", "value", "95 % interval"], lines=lines, num_labels=3)
    return f"{to_markdown(table)}\n\nresults.csv has every row."


def _verdicts(run: Path, rows: Sequence[ResultRow]) -> list[str]:
    if not rows or not (run.parent / "comparison.json").is_file():
        return []
    inputs, variant = read_inputs(run.parent), rows[0].identity.variant
    of_it = [verdict for verdict in inputs.verdicts if variant in (verdict.pair.first, verdict.pair.second)]
    sentences = [f"- {term}: {markdown_text(it)}" for term, group in verdict_lines(of_it).items() for it in group]
    head = f"Of the comparison {markdown_text(inputs.protocol.plan)}, over its seeds:"
    return [head, "\n".join(sentences)] if sentences else []
