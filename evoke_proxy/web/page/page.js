// The operators' page: the list of sessions, the selected session, the latest events. Every event
// makes the page load its data again; everything it shows comes from the admin API.

import { call, download, follow } from "./api.js";
import { accounting, firstTokens, PATHS } from "./charts.js";
import { ago, byId, bytes, clock, el, number, plural, seconds, totalLength } from "./dom.js";
import { bar, blockMap, legend } from "./map.js";

const MAX_EVENTS = 200;
const state = { sessions: [], shown: null, map: null, connected: false };
const selectedId = () => decodeURIComponent(location.hash.replace(/^#\/?/, "")) || null;
const displayName = (session) => session.name ?? session.id;

function showNotice(text) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.textContent = text ?? "";
}

async function runShowingErrors(work) {
  try {
    await work();
    showNotice(null);
  } catch (error) {
    showNotice(error.message);
  }
}

// ---- the head ----------------------------------------------------------------------------------

async function refreshHead() {
  const status = await call("GET", "status");
  const [kind, text] = !state.connected ? ["bad", "disconnected"] : status.draining ? ["bad", "stopping"]
    : !status.reachable ? ["bad", "llama-server is away"] : ["good", status.mode];
  const pill = byId("health");
  pill.className = `pill ${kind}`;
  pill.textContent = text;
  byId("server").textContent = status.server;
  byId("default-budget").hidden = status.reachable && status.mode !== "budgeted";
  servers(status.servers ?? []);
  const budget = byId("budget");
  if (document.activeElement !== budget) budget.value = status.budget ?? "";
}

// The servers of a pool: the state of each, and a button that drains it.
function servers(rows) {
  const section = byId("servers"), focused = document.activeElement?.dataset.server;
  section.hidden = !rows.length;
  if (!rows.length) return;
  const cells = rows.map((server) => el("tr", {},
    el("th", { scope: "row" }, server.name), el("td", {}, server.state),
    el("td", {}, number(server.in_flight)), el("td", {}, number(server.slots)), el("td", {}, number(server.sessions)),
    el("td", {}, server.mode),
    el("td", {}, el("button", { type: "button", "data-server": server.name, onclick: () => drain(server) },
      server.draining ? "Resume" : "Drain"))));
  section.replaceChildren(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...["server", "", "requests", "slots", "sessions", "mode", ""].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...cells))));
  if (focused) section.querySelector(`[data-server="${CSS.escape(focused)}"]`)?.focus();
}

function drain(server) {
  return runShowingErrors(async () => {
    await call("PATCH", `servers/${encodeURIComponent(server.name)}`, { draining: !server.draining });
    await refreshAll();
  });
}

byId("default-budget").addEventListener("submit", (event) => {
  event.preventDefault();
  runShowingErrors(async () => {
    await call("PUT", "budget", { budget: tokens(byId("budget").value) });
    byId("budget").blur();
    await refreshAll();
  });
});

function tokens(text) {
  const given = text.trim().replaceAll(",", "");
  if (!given) return null;
  if (!/^\d+$/.test(given)) throw new Error("A budget is a number of tokens, or nothing for no bound.");
  return Number(given);
}

// ---- the list ----------------------------------------------------------------------------------

async function refreshList() {
  state.sessions = (await call("GET", "sessions")).sessions;
  byId("count").textContent = state.sessions.length ? number(state.sessions.length) : "";
  const list = byId("sessions");
  const focused = list.contains(document.activeElement) ? document.activeElement.hash : null;
  list.replaceChildren(...state.sessions.map(row));
  if (!state.sessions.length) list.append(el("li", { class: "empty" }, "None yet. Send a chat through the proxy."));
  if (focused) [...list.querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
}

function row(session) {
  const facts = [plural(session.tokens, "token"), plural(session.turns, "turn")];
  if (!session.live) facts.splice(1, 1, "on disk");
  else if (session.slot !== null) facts.push(`slot ${session.slot}`);
  if (session.server) facts.push(session.server);
  const used = session.limit ? Math.min(1, session.resident / session.limit) : 0;
  return el("li", {}, el("a", {
    href: `#/${encodeURIComponent(session.id)}`, class: session.busy ? "busy" : null,
    "aria-current": session.id === selectedId() ? "true" : null,
  },
    el("span", { class: "name" }, displayName(session), session.pinned ? el("em", { title: "pinned" }, "pinned") : null),
    el("span", { class: "soft" }, facts.join(" · ")),
    el("span", { class: "soft when" }, ago(session.used)),
    session.limit ? el("span", {
      class: "fill", role: "img", "aria-label": `${number(session.resident)} of ${number(session.limit)} tokens in the cache`,
    }, el("i", { css: { width: `${(100 * used).toFixed(1)}%` } })) : null));
}

// ---- the selected session ------------------------------------------------------------------------

async function refreshSession() {
  const id = selectedId(), section = byId("session");
  if (!id) return blank(section, state.sessions.length ? "Select a session." : "This part shows what a session keeps in the cache.");
  let session;
  try {
    session = await call("GET", `sessions/${encodeURIComponent(id)}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    return blank(section, "This session does not exist any more.");
  }
  if (selectedId() !== id) return;
  if (state.shown !== id) {
    state.shown = id;
    state.map = blockMap((action, block) => act(id, action, block));
    section.replaceChildren(...skeleton(id));
  }
  fill(session);
}

function blank(section, text) {
  state.shown = null;
  section.replaceChildren(el("p", { class: "empty" }, text));
}

function skeleton(id) {
  const path = `sessions/${encodeURIComponent(id)}`;
  return [
    el("div", { class: "title" }, el("div", {}, el("h2", { id: "name" }), el("p", { id: "about", class: "soft" })),
      el("div", { class: "do" },
        el("button", { type: "button", id: "keep", onclick: () => runShowingErrors(() => keep(path)) }, "Pin"),
        el("button", { type: "button", onclick: () => runShowingErrors(() => download(`${path}/export`, `${id}.tar`)) }, "Export"),
        el("button", { type: "button", class: "danger", id: "delete", onclick: () => remove(path) }, "Delete"))),
    el("form", { class: "inline", id: "own-budget", onsubmit: (event) => ownBudget(event, path) },
      el("label", { for: "own" }, "Budget of this session"),
      el("input", { id: "own", inputmode: "numeric", autocomplete: "off", size: "7", placeholder: "default" }),
      el("button", {}, "Set")),
    el("div", { id: "where" }),
    el("section", { id: "mapped", "aria-label": "Map of its blocks" }, state.map.node),
    el("section", { id: "kept", "aria-label": "Snapshots" }),
    el("div", { class: "two" },
      el("section", {}, el("h3", {}, "Token accounting of every turn"), el("div", { id: "books" })),
      el("section", {}, el("h3", {}, "Time to first token, by cache path"), el("div", { id: "ttft" }))),
  ];
}

function fill(session) {
  byId("name").textContent = displayName(session);
  byId("about").textContent = about(session);
  byId("keep").textContent = session.pinned ? "Unpin" : "Pin";
  byId("keep").dataset.pinned = session.pinned;
  byId("own-budget").hidden = !session.live || !session.blocks.length;
  const own = byId("own");
  if (document.activeElement !== own) own.value = session.own_budget ? session.limit ?? "" : "";
  byId("where").replaceChildren(...(session.blocks.length ? [legend(session.totals), bar(session.totals)] : []));
  byId("mapped").hidden = !session.blocks.length;
  state.map.show(session.blocks);
  byId("kept").replaceChildren(...snapshots(session));
  byId("books").replaceChildren(keepOpen(byId("books"), accounting(session.history)));
  byId("ttft").replaceChildren(firstTokens(session.history));
}

// Opens the details of a new drawing where they were open in the old one.
function keepOpen(old, made) {
  if (old.querySelector("details")?.open) made.querySelector("details")?.setAttribute("open", "");
  return made;
}

function about(session) {
  const parts = [session.name ? session.id : null, plural(session.tokens, "token")];
  if (session.live) {
    parts.push(plural(session.turns, "turn"), session.slot === null ? "in no slot" : `slot ${session.slot}`);
    if (session.policy) parts.push(session.policy);
    parts.push(session.limit ? `budget ${number(session.limit)}` : null);
  } else parts.push("on disk only");
  if (session.tenant) parts.push(`tenant ${session.tenant}`);
  if (session.fresh === false) parts.push("not current: llama-server is busy");
  return parts.filter(Boolean).join(" · ");
}

function snapshots(session) {
  const items = session.snapshots;
  if (!items.length) return [];
  const rows = items.map((item) => el("tr", {}, ...[
    item.kind === "user" ? "user message" : "latest step", number(item.n_tokens), bytes(item.n_bytes), ago(item.used),
    item.pinned ? "yes" : "no",
  ].map((value) => el("td", {}, value))));
  return [el("h3", {}, "On disk"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...["taken", "tokens", "size", "used", "pinned"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows)))];
}

async function keep(path) {
  await call("PATCH", path, { pinned: byId("keep").dataset.pinned !== "true" });
  await refreshAll();
}

function ownBudget(event, path) {
  event.preventDefault();
  runShowingErrors(async () => {
    const given = tokens(byId("own").value);
    await call("PATCH", path, { budget: given ?? "default" });
    byId("own").blur();
    await refreshAll();
  });
}

function remove(path) {
  const dialog = byId("sure");
  byId("question").textContent = `Delete ${byId("name").textContent}: its cache rows, saved copies and files? Its next request is decoded from the start.`;
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "yes") runShowingErrors(async () => {
      const done = await call("DELETE", path);
      location.hash = "";
      await refreshAll();
      if (done.left.length) throw new Error(`Not deleted: ${done.left.join("; ")}`);
    });
  }, { once: true });
  dialog.returnValue = "";
  dialog.showModal();
}

function act(id, action, block) {
  return runShowingErrors(async () => {
    await call("POST", `sessions/${encodeURIComponent(id)}/blocks`, { action, p0: block.p0, p1: block.p1 });
    await refreshAll();
  });
}

// ---- the events --------------------------------------------------------------------------------

const EVENT_TEXTS = {
  turn: (facts) => [facts.evicted.length ? `${plural(totalLength(facts.evicted), "token")} evicted` : null,
    facts.recovered.length ? `${plural(totalLength(facts.recovered), "token")} recovered` : null],
  answer: (facts) => [facts.ttft_s === null ? null : `first token after ${seconds(facts.ttft_s)}`, facts.path === "decoded" ? null : PATHS[facts.path],
    `${number(facts.decoded)} of ${number(facts.prompt)} decoded`],
  block: (facts) => [facts.dropped ? `${plural(totalLength(facts.dropped), "token")} dropped` : null,
    facts.pinned === true ? "a block pinned" : facts.pinned === false ? "a block unpinned" : null],
  session: (facts) => ["pinned" in facts ? (facts.pinned ? "pinned" : "unpinned") : null,
    "budget" in facts ? `budget ${facts.budget ?? "none"}` : null],
  deleted: () => ["deleted"],
  forgotten: () => ["forgotten: it was unused for longest"],
  budget: (facts) => [`default budget: ${facts.budget ?? "none"}`],
  server: (facts) => [facts.patched ? `llama-server answers, ${plural(facts.slots, "slot")}` : "llama-server answers, not patched"],
  servers: (facts) => [`server ${facts.server} ${facts.state}`],
  stopping: () => ["the proxy is stopping"],
};

function addEvent(kind, facts) {
  const words = (EVENT_TEXTS[kind]?.(facts) ?? [kind]).filter(Boolean);
  if (!words.length) return;
  const session = state.sessions.find((item) => item.id === facts.session);
  const name = facts.session ? facts.name ?? (session ? displayName(session) : facts.session) : null;
  const moved = kind !== "turn" ? "" : facts.recovered.length ? " recovered" : " evicted";
  const list = byId("events");
  list.prepend(el("li", { class: `event ${kind}${moved}` }, el("time", {}, clock(facts.at)),
    name ? el("a", { href: `#/${encodeURIComponent(facts.session)}` }, name) : null, el("span", {}, words.join(" · "))));
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
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
      await refreshHead();
      await refreshList();
      await refreshSession();
      document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
      await new Promise((done) => setTimeout(done, Math.max(150, performance.now() - began)));
    }
  } finally {
    isLoading = false;
  }
}

addEventListener("hashchange", () => runShowingErrors(refreshAll));
addEventListener("visibilitychange", () => isStale && runShowingErrors(refreshAll));
setInterval(() => document.hidden || runShowingErrors(refreshAll), 20000);
runShowingErrors(refreshAll);
follow((kind, facts) => {
  addEvent(kind, facts);
  runShowingErrors(refreshAll);
}, (connected) => {
  state.connected = connected;
  runShowingErrors(refreshAll);
});
