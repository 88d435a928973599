// Draws every chart for the width and the colours at hand, and again when these change.
const { charts, themes, variants } = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 1079px)");
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
    const width = node.clientWidth - 40;
    config.legend.labelLimit = Math.min(most, width / 2 - 40);
    config.legend.columns = Math.max(2, Math.floor(width / (Math.min(longest, config.legend.labelLimit) + 36)));
    const options = { mode: "vega-lite", renderer: "svg", actions: false, config, tooltip: { theme } };
    await vegaEmbed(node, charts[node.dataset.chart], options);
  }
  document.documentElement.dataset.drawn = theme;
}

for (const query of [dark, narrow]) query.addEventListener("change", draw);
draw();
