"""Operators timed alone, one file per table: a yaml in conf/bench registers it. Nothing here trains a model, and what
several tables time lies in operators/ and profiling/."""
