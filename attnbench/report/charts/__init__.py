"""Charts: what is drawn, as plain data, its look, and Vega-Lite of it."""
