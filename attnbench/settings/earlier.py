"""Settings stored by earlier versions, in the words of this one."""

from dataclasses import replace

from attnbench.settings.registry import is_own
from attnbench.settings.schema import MixerSettings

GATES = {True: "silu", False: "none"}
"""Words for `output_gate`, which was true or false."""


def current_mixer(stored: MixerSettings) -> MixerSettings:
    """Return a mixer's settings from a file as this version names them. A class from elsewhere may mean something else
    by a word, and keeps its options."""
    gate = stored.options.get("output_gate")
    if not is_own(stored.target) or not isinstance(gate, bool):
        return stored
    return replace(stored, options={**stored.options, "output_gate": GATES[gate]})
