"""Mixers of an exported model by the names of their classes; in an exported folder this file names them."""

from attnbench.mixers.base import Mixer

MIXERS: dict[str, type[Mixer]] = {}
