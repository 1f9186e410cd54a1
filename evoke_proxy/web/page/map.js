// The blocks of a session: a row a turn, a cell a block, as wide as it has tokens.

import { el, number, plural } from "./dom.js";

export const STATES = {
  resident: "in the cache",
  saved_ram: "saved in RAM",
  saved_disk: "saved on disk",
  omitted: "omitted",
};
// A token is as wide as lets the longest turn fill its row, within these bounds; a long turn wraps.
const NARROWEST = 0.44, WIDEST = 4, LABELLED = 62;

const place = (block) => `${block.p0}-${block.p1}`;
const length = (block) => block.p1 - block.p0;

export function described(block) {
  const said = [block.role, `tokens ${number(block.p0)} to ${number(block.p1)}`, STATES[block.state]];
  if (block.pinned) said.push("pinned");
  if (block.score !== null) said.push(`score ${block.score.toFixed(2)}`);
  return said.join(", ");
}

// `act(action, block)` for what is done to a block: "pin", "unpin" or "drop".
export function blockMap(act) {
  const rows = el("div", { class: "map", role: "group", "aria-label": "Blocks, a row a turn" });
  const facts = el("dl", { id: "facts" });
  const pin = el("button", { type: "button", id: "pin", onclick: () => toggle() }, "Pin");
  const drop = el("button", { type: "button", id: "drop", class: "danger", onclick: () => act("drop", chosen()) }, "Drop");
  const inspector = el("div", { class: "inspector" }, facts, el("div", { class: "do" }, pin, drop));
  let blocks = [], at = null, pixels = NARROWEST, drawn = 0, hovered = null, before = new Map();

  const chosen = () => blocks.find((block) => place(block) === at);
  const cells = () => [...rows.querySelectorAll("button")];

  function toggle() {
    const block = chosen();
    if (block) act(block.pinned ? "unpin" : "pin", block);
  }

  function inspect() {
    const block = blocks.find((item) => place(item) === (hovered ?? at));
    const said = block ? entries(block) : [["", "Point at a block, or go through them with the arrow keys: P pins, D drops."]];
    facts.replaceChildren(...said.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    const mine = chosen();
    pin.disabled = drop.disabled = !mine || mine.role === "answer";
    pin.textContent = mine?.pinned ? "Unpin" : "Pin";
  }

  function entries(block) {
    const rowsOf = block.resident && block.resident < length(block) ? ` (${number(block.resident)} rows)` : "";
    return [
      ["from", block.name ? `${block.role} · ${block.name}` : block.role],
      ["tokens", `${number(block.p0)} to ${number(block.p1)} · ${number(length(block))}`],
      ["turn", block.turn ? number(block.turn) : "the latest answer"],
      ["is", STATES[block.state] + rowsOf + (block.pinned ? ", pinned" : "")],
      ["score", block.score === null ? "not known" : block.score.toFixed(2)],
    ];
  }

  function choose(cell, focus = true) {
    if (!cell) return;
    for (const other of cells()) {
      other.tabIndex = other === cell ? 0 : -1;
      other.setAttribute("aria-pressed", String(other === cell));
    }
    at = cell.dataset.place;
    if (focus) cell.focus();
    inspect();
  }

  function above(cell, way) {
    const box = cell.getBoundingClientRect(), middle = box.left + box.width / 2;
    const further = cells().filter((other) => (other.getBoundingClientRect().top - box.top) * way > 4);
    const tops = further.map((other) => other.getBoundingClientRect().top * way);
    const row = further.filter((_, i) => tops[i] === Math.min(...tops));
    const away = (other) => { const b = other.getBoundingClientRect(); return Math.abs(b.left + b.width / 2 - middle); };
    return row.sort((one, other) => away(one) - away(other))[0];
  }

  rows.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = cells(), i = all.indexOf(document.activeElement);
    if (i < 0) return;
    const moves = {
      ArrowRight: () => choose(all[i + 1]), ArrowLeft: () => choose(all[i - 1]),
      ArrowDown: () => choose(above(all[i], 1)), ArrowUp: () => choose(above(all[i], -1)),
      Home: () => choose(all[0]), End: () => choose(all.at(-1)),
      p: toggle, d: () => drop.disabled || act("drop", chosen()), Delete: () => drop.disabled || act("drop", chosen()),
    };
    if (moves[event.key]) {
      event.preventDefault();
      moves[event.key]();
    }
  });
  rows.addEventListener("pointerover", (event) => { hovered = event.target.dataset?.place ?? null; inspect(); });
  rows.addEventListener("pointerleave", () => { hovered = null; inspect(); });

  function cell(block) {
    const was = before.get(place(block)), moved = was && was !== block.state ? ` to-${block.state}` : "";
    const width = Math.max(7, length(block) * pixels), wide = width > LABELLED ? " wide" : "";
    return el("button", {
      type: "button",
      class: `block ${block.state}${block.pinned ? " pinned" : ""}${moved}${wide}`,
      "data-place": place(block), "data-role": block.role, tabindex: "-1",
      "aria-label": described(block), "aria-pressed": "false",
      css: { width: `${width.toFixed(1)}px` },
      onclick: (event) => choose(event.currentTarget),
      onfocus: (event) => { if (at !== event.currentTarget.dataset.place) choose(event.currentTarget, false); },
    });
  }

  function byTurn() {
    const turns = new Map();
    for (const block of blocks) turns.set(block.turn ?? "now", [...(turns.get(block.turn ?? "now") ?? []), block]);
    return turns;
  }

  function show(given) {
    const focused = rows.contains(document.activeElement);
    blocks = given;
    const turns = byTurn();
    drawn = rows.clientWidth;
    const room = drawn - 60;
    const fits = [...turns.values()].map((row) => (room - 3 * row.length) / row.reduce((sum, block) => sum + length(block), 0));
    pixels = Math.min(WIDEST, Math.max(NARROWEST, ...(fits.length ? [Math.min(...fits)] : [])));
    rows.replaceChildren(...[...turns].map(([turn, row]) => el("div", { class: "turn" },
      el("span", { class: "number", "aria-hidden": "true" }, String(turn)), el("div", { class: "cells" }, ...row.map(cell)))));
    before = new Map(blocks.map((block) => [place(block), block.state]));
    const all = cells(), same = all.find((one) => one.dataset.place === at);
    if (!same) at = null;
    if (same) choose(same, focused); else if (all.length) all[0].tabIndex = 0;
    inspect();
  }

  const again = new ResizeObserver(() => { if (blocks.length && rows.clientWidth !== drawn) show(blocks); });
  again.observe(rows);
  return { node: el("div", {}, rows, inspector), show };
}

export function legend(totals) {
  const sum = Object.values(totals).reduce((one, other) => one + other, 0) || 1;
  return el("ul", { class: "legend" }, ...Object.entries(STATES).map(([state, name]) =>
    el("li", {}, el("i", { class: `block ${state}` }), `${name} `,
      el("b", {}, number(totals[state])), ` · ${Math.round(100 * totals[state] / sum)} %`)));
}

export function bar(totals) {
  const said = Object.entries(STATES).map(([state, name]) => `${plural(totals[state], "token")} ${name}`);
  return el("div", { class: "bar", role: "img", "aria-label": said.join(", ") },
    ...Object.keys(STATES).filter((state) => totals[state]).map((state) =>
      el("i", { class: state, css: { "flex-grow": String(totals[state]) } })));
}
