// Draws every chart for the width and the colours at hand, and again when these change; sorts and copies the scores.
const { charts, themes, variants, onDark, copies } = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 1079px)");
const alike = (limit) => new Set(variants.map((name) => name.slice(0, limit / 8))).size < variants.length;
const views = [];
let round = 0;

// Colours of variants in a range are those for a light page.
const coloured = (chart) =>
  JSON.parse(JSON.stringify(chart), (key, value) =>
    key === "range" && Array.isArray(value) && dark.matches ? value.map((it) => onDark[it] ?? it) : value);

async function draw() {
  const current = ++round;
  const theme = dark.matches ? "dark" : "light";
  const config = structuredClone(themes[theme]);
  const longest = Math.max(...variants.map((name) => 8 * name.length));
  const most = config.legend.labelLimit;
  views.length = 0;
  for (const swatch of document.querySelectorAll(".swatch")) {
    swatch.dataset.light ??= swatch.dataset.colour;
    swatch.style.background = dark.matches ? onDark[swatch.dataset.light] : swatch.dataset.light;
  }
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
    const { view } = await vegaEmbed(node, coloured(charts[node.dataset.chart]), options);
    views.push(view);
  }
  document.documentElement.dataset.drawn = theme;
}

// A click on a name of the table picks the variant out in the table and in all charts.
function pick(button) {
  const wanted = button.getAttribute("aria-pressed") === "false" ? button.dataset.variant : null;
  for (const other of document.querySelectorAll(".pick")) {
    other.setAttribute("aria-pressed", other.dataset.variant === wanted);
    other.closest("tr").classList.toggle("faint", wanted !== null && other.dataset.variant !== wanted);
  }
  for (const view of views) {
    const fields = view.getState().signals?.picked_tuple_fields ?? [];
    const names = variants.includes(wanted) ? view.scale?.("color")?.domain?.() ?? [] : [];
    const value = names.find((name) => name.split(" = ").includes(wanted)) ?? wanted;
    const picked = wanted === null ? [] : [{ unit: "", fields, values: [value] }];
    try { view.data("picked_store", picked).runAsync(); } catch { /* A chart without a legend has no such data. */ }
  }
}

// Numbers in order, then cells without one; the first click brings the best to the top.
function sort(header) {
  const table = header.closest("table"), index = [...header.parentNode.children].indexOf(header);
  const first = header.textContent.includes("↑") ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const order = header.getAttribute("aria-sort") === first ? other : first;
  for (const each of header.parentNode.children) each.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const key = (row) => (row.children[index].querySelector(".value") ?? row.children[index]).textContent.trim();
  const number = (text) => parseFloat(text.replaceAll(",", ""));
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [one, two] = [key(a), key(b)];
    if (index === 0) return sign * one.localeCompare(two);
    return Number.isNaN(number(one)) - Number.isNaN(number(two)) || sign * (number(one) - number(two));
  });
  table.tBodies[0].append(...rows);
}

async function copy(button) {
  const area = Object.assign(document.createElement("textarea"), { value: copies[button.dataset.copy] });
  button.after(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  const text = button.textContent;
  button.textContent = done ? "Copied" : "The browser forbids copying";
  setTimeout(() => { button.textContent = text; }, 1500);
}

for (const button of document.querySelectorAll(".pick")) button.addEventListener("click", () => pick(button));
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
for (const header of document.querySelectorAll(".scores thead th")) {
  header.tabIndex = 0;
  header.addEventListener("click", () => sort(header));
  header.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(header); });
}
// The report of a comparison that runs is written again while it goes on.
const RELOAD_MILLISECONDS = 20000;
if (document.documentElement.dataset.running !== undefined) setTimeout(() => location.reload(), RELOAD_MILLISECONDS);
for (const query of [dark, narrow]) query.addEventListener("change", draw);
draw();
