"""Operators timed alone, one file per table: a yaml in conf/bench registers it. Parts of several tables are in
operators/ and profiling/."""
