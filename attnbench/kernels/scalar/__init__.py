"""Memories with one decay a head, which erase nothing else."""
