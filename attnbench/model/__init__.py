"""The model around a mixer, its loss, its matching, its samples. Nothing here trains."""
