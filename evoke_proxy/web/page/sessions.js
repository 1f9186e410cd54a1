// The list of sessions. Its order does not change while someone points at it or has the focus in it.

import { ago, byId, el, number, plural, reconcile } from "./dom.js";

// The list is sorted again when the pointer has been away for this time.
const RELEASE_MS = 600;
export const displayName = (session) => session.name ?? session.id;

// `emptyText` returns what an empty list says.
export function sessionList(selectedId, emptyText) {
  const list = byId("sessions");
  let sessions = [], order = [], releaseTimer = null, isTouched = false;

  const isHeld = () => isTouched || releaseTimer !== null || list.matches(":hover") || list.querySelector(":focus-visible") !== null;

  function release() {
    clearTimeout(releaseTimer);
    releaseTimer = setTimeout(() => { releaseTimer = null; isTouched = false; draw(); }, RELEASE_MS);
  }
  list.addEventListener("pointerleave", release);
  list.addEventListener("focusout", release);
  list.addEventListener("pointerdown", () => { isTouched = true; });
  for (const kind of ["pointerup", "pointercancel", "scrollend"]) list.addEventListener(kind, release);

  // The latest used first; while the list is held, in the order that is shown, with new ones below.
  function arranged() {
    const byId = new Map(sessions.map((session) => [session.id, session]));
    if (!isHeld() || !order.length) return sessions;
    const shown = order.map((id) => byId.get(id) ?? { id, gone: true });
    return [...shown, ...sessions.filter((session) => !order.includes(session.id))];
  }

  function draw() {
    const rows = arranged();
    order = rows.map((session) => session.id);
    list.querySelector(".empty")?.remove();
    reconcile(list, rows, (session) => session.id, () => el("li", {}, el("a", {})), update);
    if (!rows.length) list.append(el("li", { class: "empty" }, emptyText()));
  }

  function update(item, session) {
    const link = item.firstChild;
    if (session.gone) {
      link.classList.add("gone");
      link.lastChild.textContent = "deleted";
      return;
    }
    link.href = `#/${encodeURIComponent(session.id)}`;
    link.className = session.busy ? "busy" : "";
    if (session.id === selectedId()) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    link.replaceChildren(...parts(session));
  }

  return {
    show(rows) {
      sessions = rows;
      byId("count").textContent = rows.length ? number(rows.length) : "";
      draw();
    },
    draw,
  };
}

function parts(session) {
  const facts = [plural(session.tokens, "token"), plural(session.turns, "turn")];
  if (!session.live) facts.splice(1, 1, "on disk");
  if (session.prefill) facts.push(`decoding ${number(session.prefill[0])} of ${number(session.prefill[1])}`);
  if (session.server) facts.push(session.server);
  const used = session.limit ? Math.min(1, session.resident / session.limit) : 0;
  return [
    el("span", { class: "name" }, displayName(session), session.pinned ? el("em", {}, "pinned") : null),
    el("span", { class: "soft" }, facts.join(" · ")),
    session.limit ? el("span", {
      class: "fill", role: "img", "aria-label": `${number(session.resident)} of ${number(session.limit)} tokens in the cache`,
    }, el("i", { css: { width: `${(100 * used).toFixed(1)}%` } })) : null,
    el("span", { class: "soft when" }, ago(session.used)),
  ].filter(Boolean);
}
