// The map of a session's blocks: one row for each turn, one cell for each block, as wide as its tokens.

import { el, number, percent, plural, reconcile } from "./dom.js";

export const STATES = {
  resident: "in the cache",
  saved_ram: "saved in RAM",
  saved_disk: "saved on disk",
  omitted: "not stored",
};
// Pixels of a token: the longest turn fills its row, within these bounds, and wraps beyond them. Each block
// is wide enough to be hit.
const MIN_PIXELS = 0.44, MAX_PIXELS = 4, LABEL_PIXELS = 62, FINE_PIXELS = 24, COARSE_PIXELS = 32;
const leastWidth = () => (matchMedia("(pointer: coarse), (max-width: 48rem)").matches ? COARSE_PIXELS : FINE_PIXELS);
const HELP = "Each row is a turn. Point at a block, or select one by a click or with the arrow keys. P pins the selected"
  + " block; Delete asks, then drops it.";

const keyOf = (block) => `${block.p0}-${block.p1}`;
const length = (block) => block.p1 - block.p0;

export function describe(block) {
  const parts = [block.role, `tokens ${number(block.p0)} to ${number(block.p1)}`, STATES[block.state]];
  if (block.pinned) parts.push("pinned");
  if (block.score !== null) parts.push(`score ${block.score.toFixed(2)}`);
  return parts.join(", ");
}

// Calls `act(action, block)` with "pin", "unpin" or "drop"; that asks before it drops.
export function blockMap(act) {
  const rows = el("div", { class: "map", role: "group", "aria-label": "Blocks, one row for each turn" });
  const facts = el("dl", { id: "facts", "aria-live": "off" });
  const pin = el("button", { type: "button", id: "pin", onclick: () => toggle() }, "Pin");
  const drop = el("button", { type: "button", id: "drop", class: "danger", onclick: () => askToDrop() }, "Drop…");
  const inspector = el("div", { class: "inspector" }, facts, el("div", { class: "do" }, pin, drop));
  let blocks = [], selectedKey = null, pixels = MIN_PIXELS, least = FINE_PIXELS, drawnWidth = 0, hoveredKey = null, previousStates = new Map();

  const selected = () => blocks.find((block) => keyOf(block) === selectedKey);
  const cells = () => [...rows.querySelectorAll("button")];

  function toggle() {
    const block = selected();
    if (block) act(block.pinned ? "unpin" : "pin", block);
  }

  function askToDrop() {
    if (!drop.disabled) act("drop", selected());
  }

  function inspect() {
    const block = blocks.find((item) => keyOf(item) === (hoveredKey ?? selectedKey));
    const parts = block ? entries(block) : [["", HELP]];
    facts.replaceChildren(...parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    const current = selected();
    pin.disabled = drop.disabled = !current || current.role === "answer";
    pin.textContent = current?.pinned ? "Unpin" : "Pin";
  }

  function entries(block) {
    const rowsOf = block.resident && block.resident < length(block) ? ` (${number(block.resident)} rows)` : "";
    return [
      ["from", block.name ? `${block.role} · ${block.name}` : block.role],
      ["tokens", `${number(block.p0)} to ${number(block.p1)} · ${number(length(block))}`],
      ["turn", block.turn ? number(block.turn) : "the latest answer"],
      ["state", STATES[block.state] + rowsOf + (block.pinned ? ", pinned" : "")],
      ["score", block.score === null ? "unknown" : block.score.toFixed(2)],
    ];
  }

  function choose(cell, focus = true) {
    if (!cell) return;
    for (const other of cells()) {
      other.tabIndex = other === cell ? 0 : -1;
      other.setAttribute("aria-pressed", String(other === cell));
    }
    selectedKey = cell.dataset.place;
    if (focus) cell.focus();
    inspect();
  }

  function neighbour(cell, direction) {
    const box = cell.getBoundingClientRect(), middle = box.left + box.width / 2;
    const further = cells().filter((other) => (other.getBoundingClientRect().top - box.top) * direction > 4);
    const tops = further.map((other) => other.getBoundingClientRect().top * direction);
    const row = further.filter((_, i) => tops[i] === Math.min(...tops));
    const distance = (other) => { const b = other.getBoundingClientRect(); return Math.abs(b.left + b.width / 2 - middle); };
    return row.sort((one, other) => distance(one) - distance(other))[0];
  }

  rows.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = cells(), i = all.indexOf(document.activeElement);
    if (i < 0) return;
    const moves = {
      ArrowRight: () => choose(all[i + 1]), ArrowLeft: () => choose(all[i - 1]),
      ArrowDown: () => choose(neighbour(all[i], 1)), ArrowUp: () => choose(neighbour(all[i], -1)),
      Home: () => choose(all[0]), End: () => choose(all.at(-1)),
      p: toggle, d: askToDrop, Delete: askToDrop,
    };
    if (moves[event.key]) {
      event.preventDefault();
      moves[event.key]();
    }
  });
  // A faded edge shows that there are further turns behind it.
  function markEdges() {
    rows.classList.toggle("above", rows.scrollTop > 4);
    rows.classList.toggle("below", rows.scrollTop + rows.clientHeight < rows.scrollHeight - 4);
  }
  rows.addEventListener("scroll", markEdges, { passive: true });
  rows.addEventListener("pointerover", (event) => { hoveredKey = event.target.dataset?.place ?? null; inspect(); });
  rows.addEventListener("pointerleave", () => { hoveredKey = null; inspect(); });

  function cell(block) {
    return el("button", {
      type: "button", "data-place": keyOf(block), tabindex: "-1", "aria-pressed": "false",
      onclick: (event) => choose(event.currentTarget),
      onfocus: (event) => { if (selectedKey !== event.currentTarget.dataset.place) choose(event.currentTarget, false); },
    });
  }

  function updateCell(node, block) {
    const previous = previousStates.get(keyOf(block)), hasMoved = previous && previous !== block.state;
    const width = Math.max(least, length(block) * pixels), wide = width > LABEL_PIXELS ? " wide" : "";
    // The class of a move stays until the next one, so that its animation is not cut short.
    const moved = hasMoved ? ` to-${block.state}` : (node.className.match(/ to-\S+/)?.[0] ?? "");
    node.className = `block ${block.state}${block.pinned ? " pinned" : ""}${moved}${wide}`;
    node.dataset.role = block.role;
    node.setAttribute("aria-label", describe(block));
    node.style.setProperty("width", `${width.toFixed(1)}px`);
  }

  const turnRow = ([turn]) => el("div", { class: "turn" },
    el("span", { class: "number", "aria-hidden": "true" }, String(turn)), el("div", { class: "cells" }));

  function byTurn() {
    const turns = new Map();
    for (const block of blocks) turns.set(block.turn ?? "now", [...(turns.get(block.turn ?? "now") ?? []), block]);
    return turns;
  }

  function show(newBlocks) {
    const focused = rows.contains(document.activeElement);
    blocks = newBlocks;
    least = leastWidth();
    const turns = byTurn();
    drawnWidth = rows.clientWidth;
    const room = drawnWidth - 60;
    const fits = [...turns.values()].map((row) => (room - 3 * row.length) / row.reduce((sum, block) => sum + length(block), 0));
    const isFirst = !rows.children.length;
    pixels = Math.min(MAX_PIXELS, Math.max(MIN_PIXELS, ...(fits.length ? [Math.min(...fits)] : [])));
    const atEnd = rows.scrollTop + rows.clientHeight >= rows.scrollHeight - 4;
    reconcile(rows, [...turns], ([turn]) => turn, turnRow,
      (node, [, row]) => reconcile(node.lastChild, row, keyOf, cell, updateCell));
    // The latest turns are at the end: they stay in sight until someone scrolls back.
    if (isFirst || atEnd) rows.scrollTop = rows.scrollHeight;
    markEdges();
    previousStates = new Map(blocks.map((block) => [keyOf(block), block.state]));
    const all = cells(), same = all.find((one) => one.dataset.place === selectedKey);
    if (!same) selectedKey = null;
    if (same) choose(same, focused); else if (all.length) all[0].tabIndex = 0;
    inspect();
  }

  const observer = new ResizeObserver(() => { if (blocks.length && rows.clientWidth !== drawnWidth) show(blocks); });
  observer.observe(rows);
  return { node: el("div", {}, rows, inspector), show };
}

export function legend(totals) {
  const sum = Object.values(totals).reduce((one, other) => one + other, 0) || 1;
  return el("ul", { class: "legend" }, ...Object.entries(STATES).map(([state, name]) =>
    el("li", {}, el("i", { class: `block ${state}` }), `${name} `,
      el("b", {}, number(totals[state])), ` · ${percent(totals[state], sum)}`)));
}

export function bar(totals) {
  const parts = Object.entries(STATES).map(([state, name]) => `${plural(totals[state], "token")} ${name}`);
  return el("div", { class: "bar", role: "img", "aria-label": parts.join(", ") },
    ...Object.keys(STATES).filter((state) => totals[state]).map((state) =>
      el("i", { class: state, css: { "flex-grow": String(totals[state]) } })));
}
