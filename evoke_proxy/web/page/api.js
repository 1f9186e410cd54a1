// The admin API: JSON calls, and the event stream over fetch, so that both can carry a token.

const KEY = "evoke-token";
let asking = null;

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

// One answer to all who were refused at the same time.
export function askForToken() {
  asking ??= new Promise((done) => {
    const dialog = document.getElementById("token");
    const secret = document.getElementById("secret");
    secret.value = "";
    dialog.addEventListener("close", () => {
      if (secret.value) sessionStorage.setItem(KEY, secret.value);
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function fetched(path, options) {
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
  const answer = await fetched(path, options);
  const said = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(said.error?.message ?? answer.statusText), { status: answer.status });
  return said;
}

export async function download(path, name) {
  const answer = await fetched(path, {});
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.statusText);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Calls `told(kind, facts)` for every event, `changed(connected)` as the connection comes and goes;
// begins again, where it left off, for ever.
export async function follow(told, changed) {
  let last = "0", wait = 500;
  for (;;) {
    try {
      const answer = await fetched("events", { headers: { "Last-Event-ID": last } });
      if (!answer.ok) throw new Error(answer.statusText);
      changed(true);
      wait = 500;
      await read(answer.body, (event) => {
        last = event.id ?? last;
        told(event.event, JSON.parse(event.data));
      });
    } catch { /* it is said below, and tried again */ }
    changed(false);
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 8000);
  }
}

async function read(body, done) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done: ended } = await reader.read();
    if (ended) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const event = Object.fromEntries(part.split("\n").filter((line) => !line.startsWith(":"))
        .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (event.data) done(event);
    }
  }
}
