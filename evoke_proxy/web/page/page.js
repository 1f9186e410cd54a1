// The operators' page: totals, the list of sessions, the selected session, the latest events. Every event
// makes the page load its data again; everything it shows comes from the admin API.

import { askAgain, call, download, follow, NoAnswer, NoToken } from "./api.js";
import { budgetChanges, budgetForm, budgetText, showBudget } from "./budget.js";
import { accounting, firstTokens } from "./charts.js";
import { ago, byId, bytes, clock, el, number, plural } from "./dom.js";
import { bar, blockMap, legend, STATES } from "./map.js";
import { overview } from "./overview.js";
import { displayName, sessionList } from "./sessions.js";
import { EVENT_TEXTS, firstSession, health, modeText, noSessions, SERVER_AWAY, SNAPSHOT_KINDS } from "./words.js";

// What goes on after an answer, such as the copying of new blocks, is no event: it is loaded a while later.
const MAX_EVENTS = 200, REFRESH_MS = 20000, AFTERWARDS_MS = 2500;
const state = { sessions: [], shown: null, map: null, mode: null, status: null, streamError: null, loadError: null, hasLoaded: false, problems: [] };
const selectedId = () => {
  try { return decodeURIComponent(location.hash.replace(/^#\/?/, "")) || null; } catch { return null; } // not one of our links
};
const list = sessionList(selectedId, () => noSessions(state.status));

// ---- notices -------------------------------------------------------------------------------------

function show(id, text) {
  const box = byId(id), line = box.querySelector("p");
  box.hidden = !text;
  if (line.textContent !== (text ?? "")) line.textContent = text ?? "";
}

// Runs what its user has asked for. The error of it is shown until it is dismissed, or until the next
// action.
async function runAction(work) {
  show("notice", null);
  try {
    await work();
  } catch (error) {
    show("notice", error.message);
  }
}
byId("notice").querySelector("button").addEventListener("click", () => show("notice", null));

// The state of the connection to the proxy. What was loaded before stays, and is marked as old.
function showConnection() {
  const error = state.loadError ?? (state.streamError instanceof NoToken ? state.streamError : null);
  const box = byId("connection");
  document.body.classList.toggle("old", Boolean(error ?? state.streamError) && state.hasLoaded);
  box.querySelector("button").hidden = !(error instanceof NoToken);
  const advice = error instanceof NoAnswer
    ? " Check that it runs: this page tries again by itself, and shows the state of before until then." : "";
  show("connection", error ? `${error.message}${advice}` : null);
  if (state.streamError && !(error instanceof NoToken)) pill("bad", "disconnected");
  else if (error) pill("bad", "no token");
}
byId("connection").querySelector("button").addEventListener("click", () => {
  askAgain();
  refreshAll();
});

function pill(kind, text) {
  const node = byId("health");
  node.className = `pill ${kind}`;
  if (node.textContent !== text) node.textContent = text;
}

// ---- the head ----------------------------------------------------------------------------------

async function refreshHead() {
  const status = await call("GET", "status");
  state.mode = status.mode;
  state.status = status;
  head(status);
  byId("default-budget").hidden = status.reachable && status.mode !== "budgeted" && status.mode !== "mixed";
  servers(status.servers ?? []);
  return status;
}

function head(status) {
  pill(...health(status, !state.streamError, state.problems));
  byId("server").textContent = modeText(status, state.problems);
}

// After the sessions are loaded: their snapshots are counted. For the totals the proxy asks llama-server,
// which may have ended or started, so that the head is drawn once more.
async function refreshTotals() {
  const asked = budgetChanges();
  const facts = await call("GET", "overview");
  byId("totals").hidden = false;
  byId("totals").replaceChildren(...overview(facts, state.sessions));
  showBudget("budget", budgetText(facts.budget), asked);
  state.problems = facts.problems;
  problems(await refreshHead(), facts.problems);
  audits(facts.audits);
}

// What the audits of each budget have found, in one sentence each.
function audits(found) {
  const box = byId("audits"), text = JSON.stringify(found);
  box.hidden = !found.length;
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...found.map((budget) => el("p", {}, budget.text)));
}

function problems(status, found) {
  const lines = found.map((item) => [item.server ? `Server ${item.server}: ${item.problem}.` : `${capital(item.problem)}.`, `To fix it: ${item.fix}.`]);
  if (!status.reachable && !status.draining) lines.unshift([SERVER_AWAY]);
  const box = byId("problems"), text = JSON.stringify(lines);
  box.hidden = !lines.length;
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...lines.map((parts) => el("p", {}, parts.join(" "))));
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

// The servers of a pool: the state of each, and a button that drains it.
function servers(rows) {
  const section = byId("servers"), focused = document.activeElement?.dataset.server;
  section.hidden = !rows.length;
  if (!rows.length) return;
  const cells = rows.map((server) => el("tr", {},
    el("th", { scope: "row" }, server.name), el("td", {}, server.state),
    el("td", {}, number(server.in_flight)), el("td", {}, number(server.slots)), el("td", {}, number(server.sessions)),
    el("td", {}, server.mode),
    el("td", {}, el("button", { type: "button", "data-server": server.name, onclick: () => drain(server),
      "aria-label": `${server.draining ? "Resume" : "Drain"} server ${server.name}` },
      server.draining ? "Resume" : "Drain"))));
  section.replaceChildren(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...["server", "state", "requests", "slots", "sessions", "mode", "action"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...cells))));
  if (focused) section.querySelector(`[data-server="${CSS.escape(focused)}"]`)?.focus();
}

function drain(server) {
  return runAction(async () => {
    await call("PATCH", `servers/${encodeURIComponent(server.name)}`, { draining: !server.draining });
    await refreshAll();
  });
}

budgetForm(byId("default-budget"), (budget) => call("PUT", "budget", { budget }), refreshAll);

// ---- the selected session ------------------------------------------------------------------------

async function refreshSession() {
  const id = selectedId(), section = byId("session");
  if (!id) return blank(section, state.sessions.length ? "Select a session on the list." : firstSession(state.mode));
  const asked = budgetChanges();
  let session;
  try {
    session = await call("GET", `sessions/${encodeURIComponent(id)}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    return blank(section, "This session does not exist any more: it was deleted, or the proxy forgot it. Select another one on the list.");
  }
  if (selectedId() !== id) return;
  if (state.shown !== id) {
    state.shown = id;
    state.map = blockMap((action, block) => act(id, action, block));
    section.replaceChildren(...skeleton(id));
    budgetForm(byId("own-budget"), (budget) => call("PATCH", `sessions/${encodeURIComponent(id)}`, { budget }), refreshAll);
  }
  fill(session, asked);
}

function blank(section, text) {
  state.shown = null;
  if (section.textContent !== text) section.replaceChildren(el("p", { class: "empty" }, text));
}

function skeleton(id) {
  const path = `sessions/${encodeURIComponent(id)}`;
  return [
    el("div", { class: "title" }, el("div", {}, el("h2", { id: "name" }), el("p", { id: "about", class: "soft" })),
      el("div", { class: "do" },
        el("button", { type: "button", id: "keep", onclick: () => runAction(() => keep(path)) }, "Pin"),
        el("button", { type: "button", onclick: () => runAction(() => download(`${path}/export`, `${id}.tar`)) }, "Export"),
        el("button", { type: "button", class: "danger", id: "delete", onclick: () => remove(id, path) }, "Delete…"))),
    el("form", { class: "inline budget-form", id: "own-budget", novalidate: true },
      el("label", { for: "own" }, "Budget of this session"),
      el("input", { id: "own", autocomplete: "off", size: "7", "aria-describedby": "own-help own-error" }),
      el("button", {}, "Set"),
      el("p", { id: "own-help", class: "help" }, "tokens, ", el("b", {}, "default"), " or ", el("b", {}, "off")),
      el("p", { id: "own-error", class: "error", role: "alert" })),
    el("div", { id: "where" }),
    el("section", { id: "mapped", "aria-label": "Map of its blocks" }, state.map.node),
    el("section", { id: "kept", "aria-label": "Snapshots" }),
    el("div", { class: "two" },
      el("section", {}, el("h3", {}, "Prompt tokens of every turn"), el("div", { id: "books" })),
      el("section", {}, el("h3", {}, "Time to first token, by cache path"), el("div", { id: "ttft" }))),
  ];
}

function fill(session, budgetsAsked) {
  byId("name").textContent = displayName(session);
  byId("about").textContent = about(session);
  byId("keep").textContent = session.pinned ? "Unpin" : "Pin";
  byId("keep").dataset.pinned = session.pinned;
  byId("own-budget").hidden = !session.live || !session.blocks.length;
  showBudget("own", session.own_budget ? budgetText(session.limit) : "default", budgetsAsked);
  byId("where").replaceChildren(...(session.blocks.length ? [legend(session.totals), bar(session.totals)] : []));
  byId("mapped").hidden = !session.blocks.length;
  state.map.show(session.blocks);
  byId("kept").replaceChildren(...snapshots(session));
  byId("books").replaceChildren(keepOpen(byId("books"), accounting(session.history)));
  byId("ttft").replaceChildren(firstTokens(session.history));
}

// Opens the details of a new drawing where they were open in the old one, with the focus where it was.
function keepOpen(old, made) {
  const focused = ["summary", ".scroll"].find((part) => old.querySelector(part) === document.activeElement && document.activeElement);
  if (old.querySelector("details")?.open) made.querySelector("details")?.setAttribute("open", "");
  if (focused) queueMicrotask(() => made.querySelector(focused)?.focus({ preventScroll: true }));
  return made;
}

function about(session) {
  const parts = [session.name ? session.id : null, plural(session.tokens, "token")];
  if (session.live) {
    parts.push(plural(session.turns, "turn"), session.slot === null ? "in no slot" : `slot ${session.slot}`);
    if (session.policy) parts.push(`policy ${session.policy}`);
    parts.push(session.limit ? `budget ${number(session.limit)}` : null);
    if (session.audit) parts.push(`${number(session.audit.others)} of ${number(session.audit.audits)} audited answers changed by the budget`);
  } else parts.push("on disk only");
  if (session.tenant) parts.push(`tenant ${session.tenant}`);
  if (session.fresh === false) parts.push("as of a moment ago: llama-server is busy");
  return parts.filter(Boolean).join(" · ");
}

function snapshots(session) {
  const items = session.snapshots;
  if (!items.length) return [];
  const rows = items.map((item) => el("tr", {}, ...[
    SNAPSHOT_KINDS[item.kind] ?? item.kind, number(item.n_tokens), bytes(item.n_bytes), ago(item.used),
    item.pinned ? "yes" : "no",
  ].map((value) => el("td", {}, value))));
  return [el("h3", {}, "Snapshots on disk"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Snapshots on disk as a table" },
    el("table", {},
      el("thead", {}, el("tr", {}, ...["taken", "tokens", "size", "used", "pinned"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows)))];
}

async function keep(path) {
  await call("PATCH", path, { pinned: byId("keep").dataset.pinned !== "true" });
  await refreshAll();
}

// Asks a question, and runs `work` when the answer is the one that `verb` names.
function confirm(question, verb, work) {
  const dialog = byId("sure");
  byId("question").textContent = question;
  byId("yes").textContent = verb;
  dialog.addEventListener("close", () => { if (dialog.returnValue === "yes") runAction(work); }, { once: true });
  dialog.returnValue = "";
  dialog.showModal();
}

function remove(id, path) {
  const name = byId("name").textContent;
  const question = `Delete ${name === id ? id : `${name} (${id})`}: its rows in the cache, saved copies and files? Its next request is decoded from the start.`;
  confirm(question, "Delete", async () => {
    const done = await call("DELETE", path);
    location.hash = "";
    byId("session").focus();
    await refreshAll();
    if (done.left.length) throw new Error(`Not deleted: ${done.left.join("; ")}`);
  });
}

function act(id, action, block) {
  const send = async () => {
    await call("POST", `sessions/${encodeURIComponent(id)}/blocks`, { action, p0: block.p0, p1: block.p1 });
    await refreshAll();
  };
  if (action !== "drop") return runAction(send);
  const what = `tokens ${number(block.p0)} to ${number(block.p1)} (${block.role}, ${STATES[block.state]}) of ${byId("name").textContent}`;
  return confirm(`Drop ${what}? The model no longer sees them, and they come back only by decoding them again.`, "Drop", send);
}

// ---- the events --------------------------------------------------------------------------------

function addEvent(kind, facts) {
  const words = (EVENT_TEXTS[kind]?.(facts, state.mode) ?? [kind]).filter(Boolean);
  if (!words.length) return;
  const session = state.sessions.find((item) => item.id === facts.session);
  const name = facts.session ? facts.name ?? (session ? displayName(session) : facts.session) : null;
  const moved = kind !== "turn" ? "" : facts.recovered.length ? " recovered" : " evicted";
  const box = byId("events"), rows = box.querySelector("ol");
  box.querySelector(".empty")?.remove();
  rows.prepend(el("li", { class: `event ${kind}${moved}` }, el("time", {}, clock(facts.at)),
    name ? el("a", { href: `#/${encodeURIComponent(facts.session)}` }, name) : null, el("span", {}, words.join(" · "))));
  while (rows.children.length > MAX_EVENTS) rows.lastChild.remove();
}

// Many events may come at once: the data is loaded once for all of them, and one load ends before the
// next begins. A hidden page loads nothing, and a page whose loads take long loads less often.
let isStale = false, isLoading = false;
async function refreshAll() {
  isStale = true;
  if (isLoading || document.hidden) return;
  isLoading = true;
  try {
    while (isStale) {
      isStale = false;
      const began = performance.now();
      await load();
      document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
      await new Promise((done) => setTimeout(done, Math.max(150, performance.now() - began)));
    }
  } finally {
    isLoading = false;
  }
}

async function load() {
  try {
    await refreshHead();
    state.sessions = (await call("GET", "sessions")).sessions;
    if (!state.hasLoaded) selectLatest();
    state.hasLoaded = true;
    list.show(state.sessions);
    await refreshSession();
    await refreshTotals();
    state.loadError = null;
  } catch (error) {
    state.loadError = error;
  }
  showConnection();
}

// A page that is opened without a session shows the one that was used last.
function selectLatest() {
  if (selectedId() || !state.sessions.length) return;
  history.replaceState(null, "", `#/${encodeURIComponent(state.sessions[0].id)}`);
}

addEventListener("hashchange", () => {
  list.draw();
  refreshAll();
});
addEventListener("visibilitychange", () => isStale && refreshAll());
setInterval(refreshAll, REFRESH_MS);
// The words of events depend on the mode of the proxy, which the first load tells.
await refreshAll();
let afterwards = null;
follow((kind, facts) => {
  addEvent(kind, facts);
  refreshAll();
  clearTimeout(afterwards);
  afterwards = setTimeout(refreshAll, AFTERWARDS_MS);
}, (error) => {
  state.streamError = error;
  showConnection();
  refreshAll();
});
