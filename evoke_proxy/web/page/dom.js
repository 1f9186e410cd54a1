// Builds elements and formats numbers. Text is inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "css") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

const grouped = new Intl.NumberFormat("en");
export const number = (value) => grouped.format(value);

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const unitOf = (value) => UNITS.find(([size]) => value >= size) ?? UNITS.at(-1);
const inUnit = (value, size) => String(Math.round((10 * value) / size) / 10);

export function bytes(value) {
  const [size, unit] = unitOf(value);
  return `${inUnit(value, size)} ${unit}`;
}

// "9.9 of 256 MiB": the unit is written once where both have the same.
export function bytesOf(used, whole) {
  const [size] = unitOf(whole);
  return used && unitOf(used)[0] === size ? `${inUnit(used, size)} of ${bytes(whole)}`
    : `${used ? bytes(used) : 0} of ${bytes(whole)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "no answer";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function ago(at) {
  if (!at) return "";
  const past = Math.max(0, Date.now() / 1000 - at);
  for (const [limit, size, unit] of [[60, 1, "s"], [3600, 60, "min"], [172800, 3600, "h"]])
    if (past < limit) return `${Math.floor(past / size)} ${unit} ago`;
  return `${Math.floor(past / 86400)} d ago`;
}

// "34 %", and "<1 %" for what is more than nothing.
export function percent(part, whole) {
  const share = (100 * part) / (whole || 1);
  return share > 0 && share < 1 ? "<1\u00a0%" : `${Math.round(share)}\u00a0%`;
}

// Gives a list these items, each made once by `make(item)` and changed by `update(node, item)`. An item
// keeps its node, so that a click or the focus on it is not lost while the page is drawn again.
export function reconcile(list, items, keyOf, make, update) {
  const nodes = new Map([...list.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, i) => {
    const key = String(keyOf(item)), node = nodes.get(key) ?? make(item);
    nodes.delete(key);
    node.dataset.key = key;
    update(node, item);
    if (list.children[i] !== node) list.insertBefore(node, list.children[i] ?? null);
  });
  for (const node of nodes.values()) node.remove();
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const plural = (n, one) => `${number(n)} ${one}${n === 1 ? "" : "s"}`;
export const totalLength = (spans) => spans.reduce((sum, [start, end]) => sum + end - start, 0);
