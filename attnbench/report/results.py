"""Results of a comparison or a run for Python: tables of pandas, charts of altair, and the answer for a notebook."""

from dataclasses import replace
from functools import cached_property
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from rich.console import Console

from attnbench.machine.bars import COLUMNS
from attnbench.report.blocks import Picture
from attnbench.report.charts.style import alone
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.page import page_sections, pictures_of
from attnbench.report.sections.answer import sentences
from attnbench.report.sections.front import first_answer
from attnbench.report.sections.scores import score_table
from attnbench.report.sections.words import capitalized, metric_name, unbroken, where
from attnbench.report.terminal import print_comparison
from attnbench.results.rows import TRAINING, is_search
from attnbench.results.tables import to_html
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.escape import printable
from attnbench.training.log import stream_metrics
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.summary import summary

USUAL = ("split", "checkpoint", "chance")


class Results:
    """Results of a folder: an experiment, a run, or a published table. Files are read when something is asked for.

    In a notebook it shows what the report's first screen does: the answer in sentences, and the table of scores.

    Attributes:
        folder: where the results are.

    Raises:
        UserError: asked for anything else than its folder, of a folder without results, or with an altered file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def inputs(self) -> Inputs:
        """Rows, figures and verdicts, as the report has them."""
        return read_inputs(self.folder)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Every measured number: a line for each seed, metric and setting, as in results.csv.

        `value` is in `unit`; `low` and `high` bound a single seed's number where its evaluation gives an interval. The
        settings of an evaluation, as num_pairs, are columns of their own, empty where an evaluation lacks them.
        """
        told = [row.to_dict() for row in [*self.inputs.rows, *self.inputs.control]]
        return pd.DataFrame([{**line.pop("settings"), **line} for line in told])

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The table of the report's first screen: a line for each variant and score.

        Columns: variant, evaluation, score and at (in words), metric, unit, higher_is_better (None: neither), mean over
        `seeds` seeds, low and high (95 % interval of that mean; NaN for a few seeds, which the report shows as dots),
        solved (in words), is_best (marked as the best of its score in the report's table).
        """
        content = summary(self.inputs.figures, self.inputs.verdicts, self.inputs.protocol.variants)
        marks = [[getattr(cell, "mark", "") for cell in line[1:]] for line in score_table(content).lines]
        return pd.DataFrame(
            [
                {
                    "variant": variant,
                    "evaluation": column.evaluation,
                    "score": capitalized(metric_name(column.metric, column.unit)),
                    "at": where({name: it for name, it in column.settings.items() if name not in USUAL}),
                    "metric": column.metric,
                    "unit": column.unit,
                    "higher_is_better": column.higher_is_better,
                    "mean": figure.mean,
                    "low": nan if figure.is_of_few else figure.low,
                    "high": nan if figure.is_of_few else figure.high,
                    "seeds": len(figure.values),
                    "solved": entry.solved,
                    "is_best": mark == "best",
                }
                for (variant, entries), line in zip(content.lines.items(), marks, strict=True)
                for column, entry, mark in zip(content.columns, entries, line, strict=True)
                if (figure := entry.figure) is not None
            ]
        )

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        """A line for each tested pair of variants; empty where nothing is tested, as with plan=demo.

        Columns: first, second, evaluation, metric, at (in words), outcome (better, worse, undecided or none, of first
        than second), is_equivalent, difference (first minus second, of language models in nats a character) with low
        and high (interval adjusted for all pairs), p_value, adjusted_p_value, seeds, reason (of no verdict).
        """
        return pd.DataFrame(map(_line_of, self.inputs.verdicts), columns=VERDICT_COLUMNS)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Logged steps of all scored trainings: a line for each, by variant, evaluation, seed, run and step.

        `loss` is in nats a token, `selection` the accuracy of a probe on validation data; other columns are as in
        metrics.jsonl. Of variants that are one model, trained once, the first alone has lines.
        """
        scored = [row.identity for row in self.inputs.rows if not is_search(row.identity.seed)]
        # Evaluations of a language model have its run too.
        runs = {it.run: it for it in sorted(scored, key=lambda it: it.evaluation == TRAINING)}
        files = {run: self.inputs.folders[run] / "metrics.jsonl" for run in runs if run in self.inputs.folders}
        return pd.DataFrame(
            [
                {"variant": it.variant, "evaluation": it.evaluation, "seed": it.seed, "run": run, **step}
                for run, path in files.items()
                if path.exists()
                for it in [runs[run]]
                for step in stream_metrics(path)
            ]
        )

    @cached_property
    def _pictures(self) -> dict[str, Picture]:
        return {it.name: it for it in pictures_of(page_sections(self.inputs))}

    @property
    def plots(self) -> dict[str, str]:
        """Names of the report's charts, for `plot`, and their titles."""
        return {name: picture.title for name, picture in self._pictures.items()}

    def plot(self, name: str | None = None) -> Any:
        """Return a chart of the report, of altair and 640 pixels wide; `.save("chart.html")` writes it.

        Args:
            name: one of `plots`; None: the first.

        Raises:
            UserError: there is no such chart, or none at all.
        """
        known = self._pictures
        name = next(iter(known), "any") if name is None else name
        if name not in known:
            has = f"; there is {', '.join(known)}" if known else ""
            raise UserError(f"plot: {self.folder} has no chart {name}{did_you_mean(name, known)}{has}")
        # Imported here: altair takes a second to load.
        import altair

        spec, config = alone(known[name], self.inputs.protocol.variants)
        return altair.LayerChart.from_dict({**spec, "config": config}, validate=False)

    @property
    def sentences(self) -> list[str]:
        """The answer in sentences: who is better, by how much, and what was not decided."""
        return sentences(self.inputs)

    def __repr__(self) -> str:
        return f"Results of {self.folder}"

    def __str__(self) -> str:
        """The table and the sentences that the command prints."""
        text = StringIO()
        try:
            print_comparison(self.inputs, Console(file=text, width=COLUMNS + 1))
        except UserError as error:
            return str(error)
        return text.getvalue()

    def _repr_html_(self) -> str:
        try:
            told, scores = first_answer(self.inputs)
            said = Markup("").join(Markup("<p>{}</p>").format(unbroken(printable(sentence))) for sentence in told)
            return said + to_html(replace(scores.table, notes=[scores.note.replace("Shaded", "Bold", 1)]))
        except UserError as error:
            # A notebook would show it as an error of the cell, though the call succeeded: a dry run has no results.
            return Markup("<p>{}</p>").format(str(error))


OF_PAIR, OF_VERDICT = ("first", "second", "evaluation"), ("outcome", "is_equivalent", "difference", "low", "high")
OF_TEST = ("p_value", "adjusted_p_value")
VERDICT_COLUMNS = (*OF_PAIR, "metric", "at", *OF_VERDICT, *OF_TEST, "seeds", "reason")


def _line_of(verdict: Verdict) -> list[Any]:
    pair = verdict.pair
    return [
        *(getattr(pair, name) for name in OF_PAIR),
        pair.primary.metric,
        where(pair.settings),
        *(getattr(verdict, name) for name in (*OF_VERDICT, *OF_TEST)),
        verdict.num_seeds,
        verdict.reason,
    ]
