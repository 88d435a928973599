"""Language model around a mixer, its loss, the matching of its size, and its samples."""
