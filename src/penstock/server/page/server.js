// Requests to the server that the page came from.

import { kept } from "./store.js";

let key = sessionStorage.getItem("penstock.key") ?? kept.read("key", "");

export const hasKey = () => Boolean(key);

export function setKey(value, keep) {
  key = value;
  sessionStorage.setItem("penstock.key", key);
  kept.write("key", keep ? key : "");
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const headers = { ...(options.headers ?? {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not ours: a proxy, perhaps
  }
  throw new Refused(response.status, message);
}

export const asJson = (body) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

// The data of the events of a stream, parsed, up to [DONE].
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
    if (done) throw new Error("The connection ended before the answer was complete.");
  }
}
