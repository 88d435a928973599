"""The subcommands of `attnbench`; a program of scripts/ with the same name runs the same function.

The code that does the work is imported when a job begins: torch takes longer to load than settings to check.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line

DEMO = ("plan=demo", "device=cpu", "logger=offline")
"""Words of `attnbench demo`; the command line replaces those of the same setting."""


def demo() -> None:
    """Compare four mixers on the CPU in minutes; no download."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    sys.argv[1:1] = [word for word in DEMO if word.partition("=")[0] not in given]
    compare()


def train() -> None:
    """Train one mixer in a language model and evaluate it."""
    from attnbench.cli.launch import launch

    launch("attnbench.comparison.execute.run", "train", _print_summary, together=True)


def compare() -> None:
    """Compare variants by a plan and write a report."""
    from attnbench.cli.compose import compose
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_comparison

    launch("attnbench.comparison.compare.compare", "compare", read=read_comparison, more=[compose])


def evaluate() -> None:
    """Run more evaluations on a trained run."""
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_evaluation

    launch("attnbench.comparison.execute.evaluate_again", "evaluate", _print_summary, read_evaluation)


def _print_summary(folders: Mapping[Path, Sequence[str]]) -> None:
    from attnbench.report.terminal import print_summary

    print_summary(folders)


def findings() -> None:
    """Replicate published claims."""
    from attnbench.cli.compose import compose
    from attnbench.cli.launch import launch
    from attnbench.cli.reading_names import named_words, read_findings

    sys.argv[1:] = named_words(sys.argv[1:])
    launch("attnbench.comparison.findings.run_findings", "findings", read=read_findings, more=[compose])


@ending_in_one_line()
def report() -> None:
    """Write the report of an experiment."""
    parser = argparse.ArgumentParser(description=report.__doc__)
    parser.add_argument("folder", help="an experiment of outputs/, a run, or a published folder")
    parser.add_argument("--output", type=Path, help="folder to write; FOLDER/report if not given")
    given = parser.parse_args()
    from attnbench.report.page import write_report

    print(write_report(Path(given.folder), target=given.output))


def runs() -> None:
    """List and compare runs."""
    from attnbench.cli.launch import launch
    from attnbench.cli.reading_names import names_as_texts, read_runs

    sys.argv[1:] = names_as_texts(sys.argv[1:])
    launch("attnbench.report.run_list.show_runs", "runs", read=read_runs)


def generate() -> None:
    """Continue a prompt with the model of a run."""
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_generation

    launch("attnbench.cli.generation.write_text", "generate", read=read_generation)


def export() -> None:
    """Write a run's model as a folder for another library."""
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_export

    launch("attnbench.export.huggingface.export_run", "export", read=read_export)


def doctor() -> None:
    """Check the mixers and kernels that this machine can run."""
    from attnbench.cli.compose import compose_mixers
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_doctor

    launch("attnbench.correctness.doctor.diagnose", "doctor", read=read_doctor, more=[compose_mixers])


def bench() -> None:
    """Time operators alone and print their table."""
    from attnbench.cli.compose import compose_mixers
    from attnbench.cli.launch import launch
    from attnbench.cli.reading import read_bench

    def summarise(folders: Mapping[Path, object]) -> None:
        from attnbench.bench.page import print_tables

        print_tables(list(folders))

    launch("attnbench.bench.run.run_bench", "bench", summarise, read_bench, more=[compose_mixers])


@ending_in_one_line()
def data() -> None:
    """Download WikiText-2 or books, or copy them from a folder."""
    parser = argparse.ArgumentParser(description=data.__doc__)
    parser.add_argument("corpus", nargs="?", choices=("wikitext2", "books"), default="wikitext2")
    parser.add_argument(
        "--version",
        choices=("raw", "v1"),
        help="of WikiText-2: raw, the default, keeps every character; in v1 rare words are <unk>",
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="a folder with the three parquet files; for books it may have archives or work trees of their "
        "repositories instead; default: download",
    )
    parser.add_argument("--root", type=Path, help="folder whose data/ is filled; default: the clone, or this folder")
    given = parser.parse_args()
    if given.corpus == "books" and given.version is not None:
        parser.error("--version: is of WikiText-2; books have one version")
    from attnbench.data import books, wikitext
    from attnbench.results.folder import data_root

    root, version = given.root or data_root(), given.version or "raw"
    if given.corpus == "books":
        print(f"{books.prepare(given.source, root)}: {len(books.listed())} books, complete and as published")
    else:
        folder = wikitext.prepare(version, given.source, root)
        print(f"{folder}: WikiText-2 {version}, complete and as published")


@ending_in_one_line()
def new() -> None:
    """Write the files of a new mixer into this folder."""
    parser = argparse.ArgumentParser(
        description="Write a recurrence to change, its yaml, a plan and a test into this folder.",
        epilog="For example: attnbench new mixer fades",
    )
    parser.add_argument("kind", choices=["mixer"])
    parser.add_argument("name", help="of its file and of attn=NAME: lower-case letters, digits and _")
    given = parser.parse_args()
    from attnbench.cli.new import NEXT, write_mixer

    print(*write_mixer(given.name, Path()), NEXT.format(given.name), sep="\n")


COMMANDS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (demo, train, compare, evaluate, findings, report, runs, generate, export, doctor, bench, data, new)
}


LISTING = """\
Compare sequence mixers in one language model, on the same data and tasks.

{commands}

attnbench COMMAND --help lists its settings; attnbench --version the version."""


def main() -> None:
    """Run the subcommand that the command line names; without one, list them."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  attnbench {name:<10}{(function.__doc__ or '').rstrip('.')}" for name, function in COMMANDS.items()]
        print(LISTING.format(commands="\n".join(lines)))
    elif name == "--version":
        from importlib.metadata import version

        print(f"attnbench {version('attnbench')}")
    elif name in COMMANDS:
        sys.argv = [f"attnbench {name}", *words]
        COMMANDS[name]()
    else:
        from attnbench.machine.bars import wrapped
        from attnbench.settings.errors import did_you_mean
        from attnbench.settings.escape import printable

        unknown = f"{printable(name)}: no such command{did_you_mean(name, COMMANDS)}"
        print(wrapped(f"error: {unknown}; attnbench alone lists them"), file=sys.stderr)
        raise SystemExit(1)
