"""attnbench: any sequence mixer in the same language model, on the same data, measured by the same battery."""

NUMBERS_VERSION = {"data": 0, "mixers": 0, "model": 0, "training": 0, "evals": 0, "timing": 0}
"""Versions of the numbers that each part of the code gives, `mixers` with their kernels.

Raised by hand where golden rows change on purpose (tests/golden.py). It enters the identity of every result that the
part takes part in, so that a result of earlier numbers is measured again and never taken for one of these; 0 does not.
"""
