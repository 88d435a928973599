"""A plan on a cluster: its cells as tasks of a Slurm array job."""
