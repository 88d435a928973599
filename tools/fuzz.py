"""Feeds broken files and command lines to attnbench: `python tools/fuzz.py --inputs 5000`; see --help.

Each must end as a clean result or as one `UserError` of one line, within ten seconds of CPU, its file unchanged. A
process whose memory is capped reads them one after the other, so that what breaks a parser of another language is seen
too.
"""

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from attnbench.machine.timing import CappedChild, OutOfMemory
from attnbench.settings.errors import UserError

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from fuzz_kinds import KINDS, Kind

CPU_SECONDS, WALL_SECONDS = 10, 120
"""Most time of an input. A machine that other work keeps busy may take long over few seconds of CPU."""
MAX_DEATHS = 20
"""Of the reader, one after the other: then it is not the inputs, or they need not be counted any more."""
CAP_MIB = 2048
CLEAN, REFUSED = "clean", "refused"


class Reader:
    """Lives in the child: reads one input and says how it ended."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}

    def __call__(self, name: str, number: int, drawn: Any) -> str:
        if name not in self.kinds:
            self.kinds[name] = KINDS[name]()
            for index, (content, _) in enumerate(self.kinds[name].kept):
                # A kind whose valid files are refused would find nothing.
                self.kinds[name].read(content, index)
        # The default actions end the process, whatever library is holding it.
        signal.alarm(WALL_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            return outcome(self.kinds[name], number, drawn)
        finally:
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(kind: Kind, number: int, drawn: Any) -> str:
    """CLEAN, REFUSED, or what is wrong with how an input was received."""
    kind.given.clear()
    try:
        if drawn is not None:
            kind.read_drawn(drawn)
        else:
            kind.read(*kind.mutate(random.Random(f"{type(kind).__name__} {number}")))
    except UserError as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            return f"a refusal that is no line to show: {str(error)[:300]!r}"
        ended = REFUSED
    except Exception:
        return traceback.format_exc(limit=-4)
    else:
        ended = CLEAN
    changed = [path for path, content in kind.given.items() if path.read_bytes() != content]
    return f"changed {changed}" if changed else ended


def fuzz(child: CappedChild, name: str, num_inputs: int, start: int = 0) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and a text for each failure: the first of each sort.

    Args:
        child: has a Reader.
        start: number of the first input; the same number is the same input.
    """
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    kind = KINDS[name]
    deaths = 0

    def one(number: int, drawn: Any) -> None:
        nonlocal deaths
        try:
            ended = child.ask(name, number, drawn)
            deaths = 0
        except RuntimeError as error:
            child.close()
            ended = f"hung or died: {error}"
            deaths += 1
            if deaths == MAX_DEATHS:
                raise RuntimeError(f"{name}: the reader died {deaths} times in a row, {error}") from None
        ended = f"memory or crash: {ended.reason}" if isinstance(ended, OutOfMemory) else ended
        counts[ended if ended in (CLEAN, REFUSED) else "failed"] += 1
        if ended not in (CLEAN, REFUSED):
            where = ended.strip().splitlines()
            failures.setdefault(
                "".join(where[-3:-1])[:200] or where[-1][:20], f"{name} {number} {drawn!r}"[:600] + "\n" + ended
            )

    num_drawn = num_inputs // 2 if kind.structured is not None else 0
    for number in range(start, start + num_inputs - num_drawn):
        one(number, None)
    if kind.structured is not None:
        drawn_inputs(kind.structured, num_drawn, start, lambda drawn: one(-1, drawn))
    return counts, list(failures.values())


def drawn_inputs(strategy: Any, number: int, start: int, use: Callable[[Any], None]) -> None:
    """Gives `use` what hypothesis draws."""

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(drawn: Any) -> None:
        use(drawn)

    draw()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=5000, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    given_words = parser.parse_args()
    is_clean = True
    for name in given_words.kinds:
        started = time.perf_counter()
        with CappedChild(Reader, CAP_MIB) as child:
            counts, failures = fuzz(child, name, given_words.inputs, given_words.start)
        seconds = time.perf_counter() - started
        shown = ", ".join(f"{count} {ended}" for ended, count in sorted(counts.items()))
        print(f"{name}: {counts.total()} inputs in {seconds:.0f} s: {shown}", flush=True)
        print(*failures, sep="\n\n", end="\n" * bool(failures), flush=True)
        is_clean &= not failures
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    # The child process imports Reader from the module `fuzz`: it does not run this program.
    from fuzz import main as run_as_module

    run_as_module()
