// What the page says about the state of the proxy and about events, in words.

import { number, plural, seconds, totalLength } from "./dom.js";
import { PATHS } from "./charts.js";

// Whether a budget is configured and none is in force, although prompts can exceed the cells. A refused key
// makes a proxy degraded, too, as does a budget beyond the cells, within which sessions are then kept.
const isUnlimited = (status, problems) => status.mode === "budgeted" && status.degraded && !status.budget
  && problems.some((problem) => problem.reason === "exceeds_cells");

// One sentence for the head of the page: what happens to sessions now. `problems` are those of the overview.
export function modeText(status, problems) {
  const budget = status.budget;
  if (!status.reachable) return "";
  if (isUnlimited(status, problems)) return "Sessions are not kept within the configured budget: see below.";
  if (status.mode === "budgeted" && budget) return `Each session keeps at most ${number(budget)} tokens in the KV cache. The`
    + " rest is saved, and comes back when a question needs it.";
  if (status.mode === "snapshots" && status.snapshots_off) return "Sessions are neither saved nor restored: the directory of snapshots"
    + " cannot be used. Requests are served without it.";
  if (status.mode === "snapshots") return "Each session’s cache is saved to disk and restored when the session returns. Nothing is"
    + " evicted: that needs the patched llama-server.";
  if (status.mode === "mixed") return "The servers work in different ways: see the list below.";
  return status.server;
}

// The class and the word of the state.
export function health(status, isConnected, problems) {
  if (!isConnected) return ["bad", "disconnected"];
  if (status.draining) return ["bad", "stopping"];
  if (!status.reachable) return ["bad", "llama-server is away"];
  if (isUnlimited(status, problems)) return ["bad", "budget not in force"];
  if (status.snapshots_off) return ["bad", "snapshots are off"];
  const names = { budgeted: status.budget ? "evicting and recovering" : "nothing is evicted", snapshots: "snapshots",
    "pass-through": "passing through", mixed: "several servers" };
  return [status.mode === "pass-through" || status.degraded ? "plain" : "good", names[status.mode] ?? status.mode];
}

export const SERVER_AWAY = "llama-server does not answer, so requests fail with status 503. Start it; this page notices within"
  + " 20 seconds, and the log of the proxy names the address that it tries. Sessions are shown as they were last seen.";

const BLANKS = {
  budgeted: "This part will show which parts of the conversation are in the KV cache, which are saved, and what each turn cost.",
  snapshots: "This part will show the snapshots of the session on disk, and what each turn cost.",
  "pass-through": "This part shows nothing while requests pass through.",
};
export const firstSession = (mode) => BLANKS[mode] ?? "This part will show what each turn of the session cost.";

// What the list says while it is empty. A server that is away is not known to be without sessions.
export const noSessions = (status) => status?.reachable && status.mode === "pass-through"
  ? "None: requests pass through. Sessions are listed where the proxy keeps a budget or snapshots: the text above says what"
    + " llama-server needs for that."
  : "None yet. Send a chat request to the proxy, at the address that it printed when it started.";

// Where in a session a snapshot was taken.
export const SNAPSHOT_KINDS = {
  user: "after a user message",
  step: "after the latest step",
  prefix: "after a beginning that sessions share",
  whole: "after the latest step; other sessions may begin with it",
};

const SERVER_MODES = {
  snapshots: "llama-server answers: sessions are kept as snapshots on disk",
  "pass-through": "llama-server answers: requests pass through unchanged",
};

// The words of each kind of event, given its facts and the mode of the proxy.
export const EVENT_TEXTS = {
  turn: (facts) => [facts.evicted.length ? `${plural(totalLength(facts.evicted), "token")} evicted` : null,
    facts.recovered.length ? `${plural(totalLength(facts.recovered), "token")} recovered` : null],
  answer: (facts) => [facts.ttft_s === null ? null : `first token after ${seconds(facts.ttft_s)}`, facts.path === "decoded" ? null : PATHS[facts.path],
    `${number(facts.decoded)} of ${number(facts.prompt)} tokens decoded`],
  prefill: () => [], // the list of sessions shows it
  block: (facts) => [facts.dropped ? `${plural(totalLength(facts.dropped), "token")} dropped` : null,
    facts.pinned === true ? "a block pinned" : facts.pinned === false ? "a block unpinned" : null],
  session: (facts) => ["pinned" in facts ? (facts.pinned ? "pinned" : "unpinned") : null,
    "budget" in facts ? `budget ${facts.budget ?? "off"}` : null],
  deleted: () => ["deleted"],
  forgotten: () => ["forgotten: it was unused for longest"],
  budget: (facts) => [`default budget: ${facts.budget ?? "off"}`],
  server: (facts, mode) => [facts.patched ? `llama-server answers, ${plural(facts.slots, "slot")}`
    : SERVER_MODES[mode] ?? "llama-server answers: a standard build"],
  servers: (facts) => [`server ${facts.server} ${facts.state}`],
  stopping: () => ["the proxy is stopping"],
};
