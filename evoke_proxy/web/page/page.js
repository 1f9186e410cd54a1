// The page: a list of sessions, the chosen one, what happens. Every event makes what it is about be
// asked for again; nothing is ever computed here that the proxy knows.

import { call, download, follow } from "./api.js";
import { books, firstTokens, PATHS } from "./charts.js";
import { ago, byId, bytes, clock, el, number, plural, seconds, spanned } from "./dom.js";
import { bar, blockMap, legend } from "./map.js";

const EVENTS = 200;
const state = { sessions: [], shown: null, map: null, connected: false };
const chosen = () => decodeURIComponent(location.hash.replace(/^#\/?/, "")) || null;
const called = (session) => session.name ?? session.id;

function say(text) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.textContent = text ?? "";
}

async function trying(work) {
  try {
    await work();
    say(null);
  } catch (error) {
    say(error.message);
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

// Of several llama-servers: how each is, and a button that has conversations leave it.
function servers(rows) {
  const section = byId("servers"), focused = document.activeElement?.dataset.server;
  section.hidden = !rows.length;
  if (!rows.length) return;
  const cells = rows.map((server) => el("tr", {},
    el("th", { scope: "row" }, server.name), el("td", {}, server.state),
    el("td", {}, number(server.in_flight)), el("td", {}, number(server.slots)), el("td", {}, number(server.sessions)),
    el("td", {}, server.mode),
    el("td", {}, el("button", { type: "button", "data-server": server.name, onclick: () => drain(server) },
      server.draining ? "Use again" : "Drain"))));
  section.replaceChildren(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...["server", "", "requests", "slots", "sessions", "mode", ""].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...cells))));
  if (focused) section.querySelector(`[data-server="${CSS.escape(focused)}"]`)?.focus();
}

function drain(server) {
  return trying(async () => {
    await call("PATCH", `servers/${encodeURIComponent(server.name)}`, { draining: !server.draining });
    await refreshAll();
  });
}

byId("default-budget").addEventListener("submit", (event) => {
  event.preventDefault();
  trying(async () => {
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
    "aria-current": session.id === chosen() ? "true" : null,
  },
    el("span", { class: "name" }, called(session), session.pinned ? el("em", { title: "pinned" }, "pinned") : null),
    el("span", { class: "soft" }, facts.join(" · ")),
    el("span", { class: "soft when" }, ago(session.used)),
    session.limit ? el("span", {
      class: "fill", role: "img", "aria-label": `${number(session.resident)} of ${number(session.limit)} tokens in the cache`,
    }, el("i", { css: { width: `${(100 * used).toFixed(1)}%` } })) : null));
}

// ---- the chosen session ------------------------------------------------------------------------

async function refreshSession() {
  const id = chosen(), section = byId("session");
  if (!id) return blank(section, state.sessions.length ? "Choose a session." : "What sessions keep in the cache is shown here.");
  let session;
  try {
    session = await call("GET", `sessions/${encodeURIComponent(id)}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    return blank(section, "This session is not there any more.");
  }
  if (chosen() !== id) return;
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
        el("button", { type: "button", id: "keep", onclick: () => trying(() => keep(path)) }, "Pin"),
        el("button", { type: "button", onclick: () => trying(() => download(`${path}/export`, `${id}.tar`)) }, "Export"),
        el("button", { type: "button", class: "danger", id: "delete", onclick: () => remove(path) }, "Delete"))),
    el("form", { class: "inline", id: "own-budget", onsubmit: (event) => ownBudget(event, path) },
      el("label", { for: "own" }, "Budget of this session"),
      el("input", { id: "own", inputmode: "numeric", autocomplete: "off", size: "7", placeholder: "as the others" }),
      el("button", {}, "Set")),
    el("div", { id: "where" }),
    el("section", { id: "mapped", "aria-label": "Where its blocks are" }, state.map.node),
    el("section", { id: "kept", "aria-label": "Snapshots" }),
    el("div", { class: "two" },
      el("section", {}, el("h3", {}, "Books of every turn"), el("div", { id: "books" })),
      el("section", {}, el("h3", {}, "First token, by the way to it"), el("div", { id: "ttft" }))),
  ];
}

function fill(session) {
  byId("name").textContent = called(session);
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
  byId("books").replaceChildren(open(byId("books"), books(session.history)));
  byId("ttft").replaceChildren(firstTokens(session.history));
}

// A drawing made anew keeps its details open.
function open(old, made) {
  if (old.querySelector("details")?.open) made.querySelector("details")?.setAttribute("open", "");
  return made;
}

function about(session) {
  const said = [session.name ? session.id : null, plural(session.tokens, "token")];
  if (session.live) {
    said.push(plural(session.turns, "turn"), session.slot === null ? "in no slot" : `slot ${session.slot}`);
    if (session.policy) said.push(session.policy);
    said.push(session.limit ? `may keep ${number(session.limit)}` : null);
  } else said.push("on disk only");
  if (session.tenant) said.push(`tenant ${session.tenant}`);
  if (session.fresh === false) said.push("as last seen: llama-server is busy");
  return said.filter(Boolean).join(" · ");
}

function snapshots(session) {
  const items = session.snapshots;
  if (!items.length) return [];
  const rows = items.map((item) => el("tr", {}, ...[
    item.kind === "user" ? "after the user" : "latest step", number(item.n_tokens), bytes(item.n_bytes), ago(item.used),
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
  trying(async () => {
    const given = tokens(byId("own").value);
    await call("PATCH", path, { budget: given ?? "default" });
    byId("own").blur();
    await refreshAll();
  });
}

function remove(path) {
  const dialog = byId("sure");
  byId("question").textContent = `Delete ${byId("name").textContent}: what it has in the cache, saved and on disk? Its next request is decoded anew.`;
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "yes") trying(async () => {
      const done = await call("DELETE", path);
      location.hash = "";
      await refreshAll();
      if (done.left.length) throw new Error(`Not all of it: ${done.left.join("; ")}`);
    });
  }, { once: true });
  dialog.returnValue = "";
  dialog.showModal();
}

function act(id, action, block) {
  return trying(async () => {
    await call("POST", `sessions/${encodeURIComponent(id)}/blocks`, { action, p0: block.p0, p1: block.p1 });
    await refreshAll();
  });
}

// ---- what happens ------------------------------------------------------------------------------

const WORDS = {
  turn: (facts) => [facts.evicted.length ? `${plural(spanned(facts.evicted), "token")} evicted` : null,
    facts.recovered.length ? `${plural(spanned(facts.recovered), "token")} recovered` : null],
  answer: (facts) => [facts.ttft_s === null ? null : `first token after ${seconds(facts.ttft_s)}`, facts.path === "decoded" ? null : PATHS[facts.path],
    `${number(facts.decoded)} of ${number(facts.prompt)} decoded`],
  block: (facts) => [facts.dropped ? `${plural(spanned(facts.dropped), "token")} dropped` : null,
    facts.pinned === true ? "a block pinned" : facts.pinned === false ? "a block unpinned" : null],
  session: (facts) => ["pinned" in facts ? (facts.pinned ? "pinned" : "unpinned") : null,
    "budget" in facts ? `budget ${facts.budget ?? "none"}` : null],
  deleted: () => ["deleted"],
  forgotten: () => ["forgotten: the longest unused"],
  budget: (facts) => [`budget of sessions: ${facts.budget ?? "none"}`],
  server: (facts) => [facts.patched ? `llama-server is there, ${plural(facts.slots, "slot")}` : "llama-server is there, not patched"],
  servers: (facts) => [`server ${facts.server} ${facts.state}`],
  stopping: () => ["the proxy is stopping"],
};

function tell(kind, facts) {
  const words = (WORDS[kind]?.(facts) ?? [kind]).filter(Boolean);
  if (!words.length) return;
  const session = state.sessions.find((item) => item.id === facts.session);
  const who = facts.session ? facts.name ?? (session ? called(session) : facts.session) : null;
  const moved = kind !== "turn" ? "" : facts.recovered.length ? " came" : " went";
  const list = byId("events");
  list.prepend(el("li", { class: `told ${kind}${moved}` }, el("time", {}, clock(facts.at)),
    who ? el("a", { href: `#/${encodeURIComponent(facts.session)}` }, who) : null, el("span", {}, words.join(" · "))));
  while (list.children.length > EVENTS) list.lastChild.remove();
}

// Many events may come at once: what they are about is asked for once, and not again before it came.
// A page that nobody sees asks for nothing, and one that waits long for its answers asks less often.
let asked = false, running = false;
async function refreshAll() {
  asked = true;
  if (running || document.hidden) return;
  running = true;
  try {
    while (asked) {
      asked = false;
      const began = performance.now();
      await refreshHead();
      await refreshList();
      await refreshSession();
      document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
      await new Promise((done) => setTimeout(done, Math.max(150, performance.now() - began)));
    }
  } finally {
    running = false;
  }
}

addEventListener("hashchange", () => trying(refreshAll));
addEventListener("visibilitychange", () => asked && trying(refreshAll));
setInterval(() => document.hidden || trying(refreshAll), 20000);
trying(refreshAll);
follow((kind, facts) => {
  tell(kind, facts);
  trying(refreshAll);
}, (connected) => {
  state.connected = connected;
  trying(refreshAll);
});
