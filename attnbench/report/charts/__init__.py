"""Charts: plots as plain data, their style, and their Vega-Lite."""
