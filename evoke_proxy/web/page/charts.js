// The books of every turn, and how long the first token took by the way it was got to.

import { el, number, seconds, svg } from "./dom.js";

const BOOKS = {
  resident_before: "was there",
  recovered: "recovered",
  decoded: "decoded",
  omitted: "omitted",
};
export const PATHS = {
  resident: "was in its slot",
  recovered: "blocks copied back",
  adopted: "copied into another slot",
  restored: "restored from disk",
  ram: "out of the server's RAM",
  decoded: "decoded",
};
const HEIGHT = 120;

export function books(history) {
  if (!history.length) return el("p", { class: "empty" }, "No turn has ended yet.");
  const most = Math.max(...history.map((turn) => turn.prompt), 1);
  const shown = history.slice(-120);
  const bars = shown.map((turn, i) => column(turn, i, most));
  const budget = shown.at(-1).budget;
  const line = budget && budget < most
    ? [svg("line", { class: "budget", x1: 0, x2: shown.length, y1: y(budget, most), y2: y(budget, most) })] : [];
  const label = `Books of ${shown.length} turns; the table below has the numbers`;
  const picture = svg("svg", {
    viewBox: `0 0 ${shown.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  }, ...bars, ...line);
  picture.style.setProperty("width", `${Math.min(100, shown.length * 5)}%`);
  return el("div", {},
    el("div", { class: "chart" }, el("span", { class: "axis" }, number(most)), picture),
    el("ul", { class: "legend" }, ...Object.entries(BOOKS).map(([kind, name]) =>
      el("li", {}, el("i", { class: kind }), name)),
      ...(line.length ? [el("li", {}, el("i", { class: "budget" }), `budget ${number(budget)}`)] : [])),
    el("details", {}, el("summary", {}, "In numbers"), table(shown)));
}

const y = (tokens, most) => HEIGHT - (HEIGHT * tokens) / most;

function column(turn, i, most) {
  let below = 0;
  const parts = Object.keys(BOOKS).map((kind) => {
    const from = below;
    below += turn[kind];
    return svg("rect", {
      class: kind, x: i + 0.08, width: 0.84, y: y(below, most), height: (HEIGHT * (below - from)) / most,
    });
  });
  const said = Object.entries(BOOKS).map(([kind, name]) => `${number(turn[kind])} ${name}`).join(", ");
  return svg("g", {}, svg("title", {}, `turn ${turn.number}: ${said}`), ...parts);
}

const COLUMNS = [
  ["turn", (t) => number(t.number)], ["prompt", (t) => number(t.prompt)],
  ["was there", (t) => number(t.resident_before)], ["recovered", (t) => number(t.recovered)],
  ["decoded", (t) => number(t.decoded)], ["omitted", (t) => number(t.omitted)],
  ["peak", (t) => number(t.peak)], ["budget", (t) => (t.budget ? number(t.budget) : "none")],
  ["first token", (t) => seconds(t.ttft_s)], ["way", (t) => t.path],
];

function table(turns) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Books in numbers" },
    el("table", {}, el("thead", {}, el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...[...turns].reverse().map((turn) =>
        el("tr", {}, ...COLUMNS.map(([, value]) => el("td", {}, value(turn))))))));
}

// Dots on a scale of powers of ten, a row a path, the median as a line.
export function firstTokens(history) {
  const timed = history.filter((turn) => turn.ttft_s > 0);
  if (!timed.length) return el("p", { class: "empty" }, "No first token yet.");
  const times = timed.map((turn) => Math.log10(turn.ttft_s));
  const low = Math.floor(Math.min(...times)), high = Math.max(Math.ceil(Math.max(...times)), low + 1);
  const x = (value) => `${(100 * (Math.log10(value) - low)) / (high - low)}%`;
  const ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  const rows = Object.entries(PATHS).map(([path, name]) => [name, timed.filter((turn) => turn.path === path)])
    .filter(([, turns]) => turns.length);
  return el("div", { class: "strips" },
    ...rows.flatMap(([name, turns]) => strip(name, turns, x)),
    el("span", {}), el("div", { class: "ticks", "aria-hidden": "true" },
      ...ticks.map((tick) => el("span", { css: { left: x(tick) } }, tick < 1 ? seconds(tick) : `${tick} s`))));
}

function strip(name, turns, x) {
  const sorted = turns.map((turn) => turn.ttft_s).sort((one, other) => one - other);
  const middle = sorted[Math.floor((sorted.length - 1) / 2)];
  const said = `${turns.length} ${turns.length === 1 ? "turn" : "turns"}, median ${seconds(middle)}`;
  return [
    el("span", { class: "way" }, name, el("small", {}, said)),
    el("div", { class: "strip", role: "img", "aria-label": `${name}: ${said}` },
      ...turns.map((turn) => el("i", { title: `turn ${turn.number}: ${seconds(turn.ttft_s)}`, css: { left: x(turn.ttft_s) } })),
      el("b", { css: { left: x(middle) } })),
  ];
}
