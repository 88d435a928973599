"""Settings: fields, rules, errors, and the classes that may be built.

Nothing here loads torch or Hydra, or knows where a value comes from.
"""
