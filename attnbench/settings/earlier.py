"""Settings stored by earlier versions."""

from dataclasses import replace

from attnbench.settings.registry import is_own
from attnbench.settings.schema import MixerSettings

GATES = {True: "silu", False: "none"}
"""`output_gate` was true or false."""


def current_mixer(stored: MixerSettings) -> MixerSettings:
    """Give a stored mixer the options of this version; a class from outside attnbench keeps its options."""
    gate = stored.options.get("output_gate")
    if not is_own(stored.target) or not isinstance(gate, bool):
        return stored
    return replace(stored, options={**stored.options, "output_gate": GATES[gate]})
