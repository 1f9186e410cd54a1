// Client of the admin API: JSON calls, and the event stream over fetch, so that both can send a token.

const KEY = "evoke-token";
// The dialog that is open now, and whether its user has closed it without a token.
let pendingToken = null, hasDeclined = false;

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export class NoToken extends Error {}
export class NoAnswer extends Error {}

// Opens the token dialog once for all calls that are refused at the same time. Resolves to whether its
// user has given a token.
function askForToken(isWrong) {
  pendingToken ??= new Promise((done) => {
    const dialog = document.getElementById("token"), secret = document.getElementById("secret");
    secret.value = "";
    document.getElementById("token-error").textContent =
      isWrong ? "The proxy refused this token. Copy the whole line from the file, and try again." : "";
    document.getElementById("no-token").onclick = () => dialog.close("cancelled");
    dialog.returnValue = "cancelled";
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" ? secret.value.trim() : "";
      if (given) sessionStorage.setItem(KEY, given);
      secret.value = "";
      hasDeclined = !given;
      pendingToken = null;
      done(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return pendingToken;
}

// Makes the next call that needs a token ask for it again.
export function askAgain() {
  hasDeclined = false;
}

async function fetchWithToken(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" })
      .catch(() => { throw new NoAnswer(`evoke-proxy does not answer at ${location.origin}.`); });
    if (answer.status !== 401) return answer;
    if (token !== sessionStorage.getItem(KEY)) continue; // another call has asked for it meanwhile
    sessionStorage.removeItem(KEY);
    if (hasDeclined || !(await askForToken(token !== null))) throw new NoToken("Without the token this page can show nothing.");
  }
}

async function failure(answer) {
  const text = await answer.text();
  let message = null;
  try { message = JSON.parse(text).error?.message; } catch { /* another proxy has answered */ }
  return Object.assign(new Error(message ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
}

export async function call(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await fetchWithToken(path, options);
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

export async function download(path, name) {
  const answer = await fetchWithToken(path);
  if (!answer.ok) throw await failure(answer);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Calls `onEvent(kind, facts)` for every event, and `onConnection(error)` on each change of the
// connection, with null when it is made. Reconnects for ever, and continues after the last event that
// it has read.
export async function follow(onEvent, onConnection) {
  let last = "0", wait = 500;
  for (;;) {
    let reason = new NoAnswer(`evoke-proxy at ${location.origin} has closed the connection.`);
    try {
      const answer = await fetchWithToken("events", { headers: { "Last-Event-ID": last } });
      if (!answer.ok) throw await failure(answer);
      onConnection(null);
      wait = 500;
      await read(answer.body, (event) => {
        last = event.id ?? last;
        onEvent(event.event, JSON.parse(event.data));
      });
    } catch (error) {
      // A connection that breaks while it is read has no reason of its own.
      if (error instanceof NoToken || error instanceof NoAnswer || error.status) reason = error;
    }
    onConnection(reason);
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 8000);
  }
}

async function read(body, onMessage) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done: ended } = await reader.read();
    if (ended) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const event = Object.fromEntries(part.split("\n").filter((line) => !line.startsWith(":"))
        .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (event.data) onMessage(event);
    }
  }
}
