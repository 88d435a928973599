// Draws every chart for the width and the colours at hand, and again when these change.
const { charts, themes, variants } = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 1079px)");
const alike = (limit) => new Set(variants.map((name) => name.slice(0, limit / 8))).size < variants.length;
let round = 0;

async function draw() {
  const current = ++round;
  const theme = dark.matches ? "dark" : "light";
  const config = structuredClone(themes[theme]);
  const longest = Math.max(...variants.map((name) => 8 * name.length));
  const most = config.legend.labelLimit;
  for (const node of document.querySelectorAll("[data-chart]")) {
    // A change of colours while drawing starts all over.
    if (current !== round) return;
    // As many names in a row as the width holds, at least two; a longer name is cut, and stands whole in the tables.
    // Where two names would be cut to one, each has a row of its own.
    const width = node.clientWidth - 40;
    const half = Math.min(most, width / 2 - 40);
    const limit = alike(half) ? width - 40 : half;
    config.legend.labelLimit = limit;
    config.legend.columns = Math.max(alike(half) ? 1 : 2, Math.floor(width / (Math.min(longest, limit) + 36)));
    const options = { mode: "vega-lite", renderer: "svg", actions: false, config, tooltip: { theme } };
    await vegaEmbed(node, charts[node.dataset.chart], options);
  }
  document.documentElement.dataset.drawn = theme;
}

for (const query of [dark, narrow]) query.addEventListener("change", draw);
draw();
