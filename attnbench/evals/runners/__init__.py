"""Runners: the job of each kind of evaluation."""
