// Charts: the token accounting of every turn, and the time to the first token by cache path.

import { el, number, seconds, svg } from "./dom.js";

// What became of the tokens of a prompt, with the class of the colour of each.
export const ACCOUNTS = {
  resident_before: ["already in the cache", "turn-resident"],
  recovered: ["recovered by a copy", "turn-recovered"],
  decoded: ["decoded", "turn-decoded"],
  omitted: ["hidden from the model", "turn-hidden"],
};
const HIDDEN_NOTE = "Hidden from the model: the part of the prompt that this answer was made without. It is saved, unless"
  + " the map above says “not stored”, and comes back when a question needs it.";
export const PATHS = {
  resident: "resident in its slot",
  recovered: "blocks copied back",
  adopted: "copied into another slot",
  restored: "restored from disk",
  ram: "from the server's RAM cache",
  decoded: "decoded",
};
const HEIGHT = 120;

export function accounting(history) {
  if (!history.length) return el("p", { class: "empty" }, "No answer is complete yet.");
  const highest = Math.max(...history.map((turn) => turn.prompt), 1);
  const recent = history.slice(-120);
  const bars = recent.map((turn, i) => column(turn, i, highest));
  const budget = recent.at(-1).budget;
  const line = budget && budget < highest
    ? [svg("line", { class: "budget", x1: 0, x2: recent.length, y1: y(budget, highest), y2: y(budget, highest) })] : [];
  const label = `Token accounting of ${recent.length} turns; the table below has the numbers`;
  const picture = svg("svg", {
    viewBox: `0 0 ${recent.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  }, ...bars, ...line);
  picture.style.setProperty("width", `${Math.min(100, recent.length * 5)}%`);
  return el("div", {},
    el("div", { class: "chart" }, el("span", { class: "axis" }, number(highest)), picture),
    el("ul", { class: "legend" }, ...Object.values(ACCOUNTS).map(([name, kind]) =>
      el("li", {}, el("i", { class: kind }), name)),
      ...(line.length ? [el("li", {}, el("i", { class: "budget" }), `budget ${number(budget)}`)] : [])),
    recent.some((turn) => turn.omitted) ? el("p", { class: "note" }, HIDDEN_NOTE) : null,
    el("details", {}, el("summary", {}, "As a table"), table(recent)));
}

const y = (tokens, highest) => HEIGHT - (HEIGHT * tokens) / highest;

function column(turn, i, highest) {
  let below = 0;
  const parts = Object.entries(ACCOUNTS).map(([kind, [, style]]) => {
    const from = below;
    below += turn[kind];
    return svg("rect", {
      class: style, x: i + 0.08, width: 0.84, y: y(below, highest), height: (HEIGHT * (below - from)) / highest,
    });
  });
  const summary = Object.entries(ACCOUNTS).map(([kind, [name]]) => `${number(turn[kind])} ${name}`).join(", ");
  return svg("g", {}, svg("title", {}, `turn ${turn.number}: ${summary}`), ...parts);
}

const COLUMNS = [
  ["turn", (t) => number(t.number)], ["prompt", (t) => number(t.prompt)],
  ["in the cache", (t) => number(t.resident_before)], ["recovered", (t) => number(t.recovered)],
  ["decoded", (t) => number(t.decoded)], ["hidden", (t) => number(t.omitted)],
  ["most in cache", (t) => number(t.peak)], ["budget", (t) => (t.budget ? number(t.budget) : "off")],
  ["first token", (t) => seconds(t.ttft_s)], ["path", (t) => t.path],
];

function table(turns) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Token accounting as a table" },
    el("table", {}, el("thead", {}, el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...[...turns].reverse().map((turn) =>
        el("tr", {}, ...COLUMNS.map(([, value]) => el("td", {}, value(turn))))))));
}

// One row for each path: a dot for each turn on a logarithmic scale, and a line at the median.
export function firstTokens(history) {
  const timed = history.filter((turn) => turn.ttft_s > 0);
  if (!timed.length) return el("p", { class: "empty" }, "No answer has begun yet.");
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
  const summary = `${turns.length} ${turns.length === 1 ? "turn" : "turns"}, median ${seconds(middle)}`;
  return [
    el("span", { class: "way" }, name, el("small", {}, summary)),
    el("div", { class: "strip", role: "img", "aria-label": `${name}: ${summary}` },
      ...turns.map((turn) => el("i", { title: `turn ${turn.number}: ${seconds(turn.ttft_s)}`, css: { left: x(turn.ttft_s) } })),
      el("b", { css: { left: x(middle) } })),
  ];
}
