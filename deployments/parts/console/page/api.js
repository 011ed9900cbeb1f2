// Requests to this server. The API key lives in this tab's session storage, and goes nowhere else.

const KEY = "manta-api-key";
export const base = new URL("./", document.baseURI);
let asking = null; // a promise while the dialog is open: all requests wait for the same answer

export class ApiError extends Error {}

export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(new URL(path, base), { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(await message(response));
    const problem = key ? await message(response) : "";
    // another request may have asked meanwhile
    if (key === sessionStorage.getItem(KEY)) await (asking ??= askForKey(problem));
  }
}

export const getJson = async (path) => (await request(path)).json();

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

async function message(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `HTTP ${response.status}`;
}

function askForKey(problem) {
  const dialog = document.getElementById("key");
  const input = document.getElementById("key-input");
  document.getElementById("key-problem").textContent = problem;
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.oncancel = (event) => event.preventDefault(); // there is nothing behind it to go back to
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
}

// The data of each server-sent event, until the stream ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    await reader.cancel().catch(() => {}); // the stream may have failed
  }
}
