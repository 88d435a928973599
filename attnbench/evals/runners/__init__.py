"""How evaluations of each kind are run."""
