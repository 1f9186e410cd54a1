// The totals over all sessions: cells, stores of saved blocks, prompt tokens, evictions and recoveries.

import { ACCOUNTS } from "./charts.js";
import { bytes, bytesOf, el, number, percent } from "./dom.js";

export function overview(facts, sessions) {
  const stored = sessions.filter((session) => !session.live).length;
  const snapshotBytes = sessions.reduce((sum, session) => sum + (session.bytes ?? 0), 0);
  return [
    figure("Sessions", number(sessions.length), stored ? `${number(stored)} of them on disk only` : null),
    facts.cells ? gauge("Tokens in the KV cache", facts.resident, facts.cells, (used, size) => `${number(used)} of ${number(size)}`) : null,
    facts.ram ? gauge("Saved in RAM", facts.ram.used, facts.ram.budget, bytesOf, lost(facts.ram.dropped, "copies given up for lack of room")) : null,
    facts.disk ? gauge("Saved on disk", facts.disk.used, facts.disk.budget, bytesOf, lost(facts.disk.failed, "copies could not be written")) : null,
    snapshotBytes ? figure("Snapshots on disk", bytes(snapshotBytes)) : null,
    facts.cells ? figure("Blocks", `${number(facts.blocks_evicted)} evicted`, `${number(facts.blocks_recovered)} recovered`) : null,
    prompts(facts.tokens),
  ].filter(Boolean);
}

const lost = (count, how) => (count ? `${number(count)} ${how}` : null);

function figure(name, value, more) {
  return el("div", { class: "figure" }, el("h2", {}, name), el("p", { class: "value" }, value), more ? el("p", { class: "soft" }, more) : null);
}

function gauge(name, used, size, format, problem = null) {
  const share = Math.min(1, used / size), text = format(used, size);
  const level = el("div", {
    class: "gauge", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": String(size),
    "aria-valuenow": String(Math.min(used, size)), "aria-valuetext": text,
  }, el("i", { css: { width: `${(100 * share).toFixed(1)}%` } }));
  return el("div", { class: "figure" }, el("h2", {}, name), el("p", { class: "value" }, text), level,
    problem ? el("p", { class: "error" }, problem) : null);
}

// The prompt tokens of all answers since the proxy has started.
function prompts(tokens) {
  const sum = Object.values(tokens).reduce((one, other) => one + other, 0);
  if (!sum) return null;
  const parts = Object.entries(ACCOUNTS).filter(([kind]) => tokens[kind]);
  return el("div", { class: "figure wide" }, el("h2", {}, "Prompt tokens since the start"),
    el("p", { class: "value" }, number(sum)),
    el("div", { class: "bar", role: "img", "aria-label": parts.map(([kind, [name]]) => `${percent(tokens[kind], sum)} ${name}`).join(", ") },
      ...parts.map(([kind, [, style]]) => el("i", { class: style, css: { "flex-grow": String(tokens[kind]) } }))),
    el("p", { class: "soft" }, parts.map(([kind, [name]]) => `${percent(tokens[kind], sum)} ${name}`).join(" · ")));
}
