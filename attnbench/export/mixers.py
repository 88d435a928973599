"""Mixers of an exported model by class name; an exported folder has its own version of this file."""

from attnbench.mixers.base import Mixer

MIXERS: dict[str, type[Mixer]] = {}
