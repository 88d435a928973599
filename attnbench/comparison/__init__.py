"""Many jobs: a plan, its cells, its searches of rates, carried out."""
