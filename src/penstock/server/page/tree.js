// A conversation: messages in a tree, of which one path is shown. Whatever is edited or answered again stands beside
// what was there, so nothing is lost.

import { newId } from "./dom.js";

export class Conversation {
  constructor(about = {}, messages = []) {
    const now = Date.now();
    this.about = { id: newId(), title: "", named: false, created: now, updated: now, chosen: {}, ...about };
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  get id() {
    return this.about.id;
  }

  // Messages that follow one, in the order in which they were made; "" stands for the beginning.
  children(parent) {
    return [...this.messages.values()].filter((message) => message.parent === parent).sort((a, b) => a.time - b.time || (a.id < b.id ? -1 : 1));
  }

  siblings(message) {
    return this.children(message.parent);
  }

  // The messages that are shown, up to one that is not (or all).
  path(before = null) {
    const found = [];
    const seen = new Set();
    for (let at = ""; ; at = found.at(-1).id) {
      const children = this.children(at);
      const next = children.find((child) => child.id === this.about.chosen[at]) ?? children.at(-1);
      if (!next || next === before || seen.has(next.id)) return found;
      seen.add(next.id);
      found.push(next);
    }
  }

  add(role, parent, more) {
    const last = this.siblings({ parent }).at(-1)?.time ?? 0;
    const message = { id: newId(), conversation: this.id, parent, role, content: "", time: Math.max(Date.now(), last + 1), ...more };
    this.messages.set(message.id, message);
    this.choose(message);
    if (!this.about.title && role === "user") this.about.title = titleOf(message);
    return message;
  }

  choose(message) {
    this.about.chosen = { ...this.about.chosen, [message.parent]: message.id };
  }

  remove(message) {
    this.messages.delete(message.id);
    const { [message.parent]: chosen, ...others } = this.about.chosen;
    if (chosen === message.id) this.about.chosen = others;
  }
}

const titleOf = ({ content, files }) => {
  const line = content.trim().split("\n")[0] || files?.[0]?.name || "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
};

// ---------------------------------------------------------------------------------------------------------------------
// Files of conversations

const FORMAT = "penstock-conversations";

export const exported = (conversations) =>
  JSON.stringify(
    { format: FORMAT, version: 1, conversations: conversations.map(({ about, messages }) => ({ ...about, messages: [...messages.values()].map(({ heat, ...message }) => message) })) },
    null,
    1,
  );

// The conversations of an exported file. Throws an Error that says what is wrong with it.
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON");
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error("it is no export of conversations of this page");
  }
  return data.conversations.map((given, n) => {
    const wrong = (what) => new Error(`conversation ${n + 1}: ${what}`);
    if (!isId(given?.id) || typeof given.title !== "string" || !Array.isArray(given.messages)) throw wrong("id, title or messages are missing");
    const messages = given.messages.map((message, m) => {
      const known = ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
      if (!known || !isId(message.id) || !(message.parent === "" || isId(message.parent))) throw wrong(`message ${m + 1} is not whole`);
      const made = { conversation: given.id, time: Number.isFinite(message.time) ? message.time : m };
      for (const name of ["id", "parent", "role", "content"]) made[name] = message[name];
      for (const name of ["reasoning", "numbers", "error", "cut"]) if (typeof message[name] === "string") made[name] = message[name];
      if (Number.isFinite(message.thought)) made.thought = message.thought;
      if (Array.isArray(message.files)) {
        made.files = message.files.filter((file) => typeof file?.name === "string" && typeof file.text === "string").map(({ name, text }) => ({ name, text }));
      }
      return made;
    });
    const time = (value) => (Number.isFinite(value) ? value : Date.now());
    const chosen = Object.fromEntries(Object.entries(given.chosen ?? {}).filter(([at, id]) => (at === "" || isId(at)) && isId(id)));
    const about = { id: given.id, title: given.title.slice(0, 200), named: given.named === true, created: time(given.created), updated: time(given.updated), chosen };
    return new Conversation(about, messages);
  });
}

const isId = (id) => typeof id === "string" && /^[\w-]{1,64}$/.test(id);
