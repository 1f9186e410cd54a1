// Client of the admin API: JSON calls, and the event stream over fetch, so that both can send a token.

const KEY = "evoke-token";
let pendingToken = null;

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

// Opens the token dialog once for all calls that are refused at the same time.
export function askForToken() {
  pendingToken ??= new Promise((done) => {
    const dialog = document.getElementById("token");
    const secret = document.getElementById("secret");
    secret.value = "";
    dialog.addEventListener("close", () => {
      if (secret.value) sessionStorage.setItem(KEY, secret.value);
      pendingToken = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return pendingToken;
}

async function fetchWithToken(path, options) {
  for (;;) {
    const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
    if (answer.status !== 401) return answer;
    sessionStorage.removeItem(KEY);
    await askForToken();
  }
}

export async function call(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await fetchWithToken(path, options);
  const result = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(result.error?.message ?? answer.statusText), { status: answer.status });
  return result;
}

export async function download(path, name) {
  const answer = await fetchWithToken(path, {});
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.statusText);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Calls `onEvent(kind, facts)` for every event and `onConnection(connected)` on each change of the
// connection. Reconnects for ever, and continues after the last event that it has read.
export async function follow(onEvent, onConnection) {
  let last = "0", wait = 500;
  for (;;) {
    try {
      const answer = await fetchWithToken("events", { headers: { "Last-Event-ID": last } });
      if (!answer.ok) throw new Error(answer.statusText);
      onConnection(true);
      wait = 500;
      await read(answer.body, (event) => {
        last = event.id ?? last;
        onEvent(event.event, JSON.parse(event.data));
      });
    } catch { /* reported by onConnection below; the loop reconnects */ }
    onConnection(false);
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
