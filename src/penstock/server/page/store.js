// What is kept in the browser: settings in localStorage, conversations in IndexedDB.
//
// A conversation and each of its messages are records of their own, so that two tabs which add to one conversation both
// keep what they wrote. Without IndexedDB (some private windows) everything lives as long as the page, and that is said.

export const kept = {
  read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`penstock.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  write(name, value) {
    try {
      localStorage.setItem(`penstock.${name}`, JSON.stringify(value));
    } catch {
      // full, or not allowed: the page works without
    }
  },
  forget(name) {
    try {
      localStorage.removeItem(`penstock.${name}`);
    } catch {
      // as above
    }
  },
};

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let opened = null;
function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("penstock", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds the storage"));
  });
  return opened;
}

// A transaction over both kinds of records; it is complete when the promise is.
async function transaction(mode, work) {
  const made = (await database()).transaction(["conversations", "messages"], mode);
  const done = new Promise((resolve, reject) => {
    made.oncomplete = resolve;
    made.onabort = () => reject(made.error ?? new Error("the storage refused"));
  });
  const [result] = await Promise.all([work(made.objectStore("conversations"), made.objectStore("messages")), done]);
  return result;
}

export const store = {
  // Called with null when all is kept, else with what the reader should know.
  trouble: () => {},
  // Called when another tab has changed something.
  elsewhere: () => {},
  unsaved: new Map(), // records that could not be written yet
  gone: null, // why there is no storage at all

  async list() {
    let found = [];
    try {
      if (!this.gone) found = await transaction("readonly", (conversations) => settled(conversations.getAll()));
    } catch {
      this.gone = "This browser lets the page keep nothing: conversations end with the page. Export what matters.";
      this.trouble(this.gone);
    }
    return this._with(found, (record) => !record.conversation);
  },

  async messages(id) {
    const found = this.gone ? [] : await transaction("readonly", (_, messages) => settled(messages.index("conversation").getAll(id)));
    return this._with(found, (record) => record.conversation === id);
  },

  async allMessages() {
    const found = this.gone ? [] : await transaction("readonly", (_, messages) => settled(messages.getAll()));
    return this._with(found, (record) => Boolean(record.conversation));
  },

  // Records with those that are not written yet.
  _with(found, belongs) {
    const held = [...this.unsaved.values()].filter(belongs);
    return [...new Map([...found, ...held].map((record) => [record.id, record])).values()];
  },

  // Write a conversation's record and some of its messages. What cannot be written now is tried again with the next.
  async save(about, messages = []) {
    for (const record of [about, ...messages]) this.unsaved.set(record.id, record);
    if (this.gone) return;
    const writing = [...this.unsaved.values()];
    try {
      await transaction("readwrite", (conversations, stored) => {
        for (const record of writing) (record.conversation ? stored : conversations).put(record);
      });
    } catch (error) {
      const full = error?.name === "QuotaExceededError";
      const why = full ? "The browser's storage is full" : `The browser did not keep this (${error?.message ?? error})`;
      this.trouble(`${why}: what is new here is lost when the page is closed. Export it, or delete other conversations.`);
      return;
    }
    for (const record of writing) if (this.unsaved.get(record.id) === record) this.unsaved.delete(record.id);
    this.trouble(null);
    this._tell();
  },

  // Delete a conversation; returns its messages, so that it can be brought back.
  async remove(id) {
    const held = this._with([], (record) => record.conversation === id);
    for (const record of [{ id }, ...held]) this.unsaved.delete(record.id);
    if (this.gone) return held;
    const found = await transaction("readwrite", async (conversations, messages) => {
      const all = await settled(messages.index("conversation").getAll(id));
      conversations.delete(id);
      for (const message of all) messages.delete(message.id);
      return all;
    });
    this._tell();
    return [...new Map([...found, ...held].map((message) => [message.id, message])).values()];
  },

  async removeMessages(ids) {
    for (const id of ids) this.unsaved.delete(id);
    if (!this.gone) await transaction("readwrite", (_, messages) => ids.forEach((id) => messages.delete(id)));
  },

  _channel: typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("penstock"),
  _tell() {
    this._channel?.postMessage("changed");
  },
};
if (store._channel) store._channel.onmessage = () => store.elsewhere();
