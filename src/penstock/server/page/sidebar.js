// The list of conversations: open, rename, delete, search, export, import.

import { changes, current, focusInput, open, openBlank, opened, running } from "./chat.js";
import { $, action, announce, el, ICONS, toast } from "./dom.js";
import { kept, store } from "./store.js";
import { Conversation, exported, imported } from "./tree.js";

const NARROW = matchMedia("(max-width: 899px)"); // here the list lies over the page
let listed = []; // records of conversations, the newest first
let found = null; // ids that the search has found; null: no search
let renaming = null;

// What is looked at: in this tab when it is loaded again, and in the next one that is opened.
function remember(id) {
  sessionStorage.setItem("penstock.current", id);
  kept.write("current", id);
}

async function refresh() {
  const stored = await store.list();
  const known = new Map(stored.map((about) => [about.id, about]));
  if (current.messages.size) known.set(current.id, current.about);
  listed = [...known.values()].sort((a, b) => b.updated - a.updated);
  show();
}

function show() {
  if ($("conversations").querySelector("input")) return; // a name is being written
  const shown = listed.filter((about) => found === null || found.has(about.id));
  const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
  $("conversations").replaceChildren(...shown.map(row));
  if (focused) $("conversations").querySelector(`[data-id="${focused}"] .open`)?.focus();
  $("no-conversations").hidden = shown.length > 0;
  $("no-conversations").textContent = found === null ? "Conversations are kept here, in this browser." : "Nothing was found.";
}

function row(about) {
  const item = el("li", about.id === current.id ? "current" : "");
  item.dataset.id = about.id;
  if (about.id === renaming) {
    item.append(nameField(about));
    return item;
  }
  const button = el("button", "open", about.title || "Untitled");
  button.type = "button";
  button.title = `${about.title || "Untitled"}\n${new Date(about.updated).toLocaleString()}`;
  if (about.id === current.id) button.setAttribute("aria-current", "true");
  if (running(about.id)) button.prepend(el("span", "dot writing"), el("span", "spoken", "being answered: "));
  button.addEventListener("click", () => choose(about.id));
  button.addEventListener("dblclick", () => rename(about.id));
  button.addEventListener("keydown", (event) => {
    if (event.key === "F2") rename(about.id);
    if (event.key === "Delete") remove(about.id);
  });
  const name = about.title || "Untitled";
  item.append(
    button,
    el(
      "span",
      "actions",
      action(`Rename ${name}`, ICONS.pen, () => rename(about.id)),
      action(`Export ${name}`, ICONS.save, () => exportThese([about.id])),
      action(`Delete ${name}`, ICONS.bin, () => remove(about.id)),
    ),
  );
  return item;
}

const shownRows = () => [...$("conversations").querySelectorAll(".open")];

async function read(id) {
  const here = opened(id);
  if (here) return here;
  const about = listed.find((one) => one.id === id);
  const messages = about ? await store.messages(id) : [];
  return about ? new Conversation(about, messages) : null;
}

async function choose(id) {
  const conversation = await read(id);
  if (!conversation) return;
  if (id !== current.id) open(conversation);
  remember(id);
  close();
  focusInput();
}

export function fresh() {
  openBlank();
  remember("");
  close();
  focusInput();
}

function rename(id) {
  renaming = id;
  show();
  $("conversations").querySelector("input")?.select();
}

function nameField(about) {
  const field = el("input");
  Object.assign(field, { type: "text", value: about.title, maxLength: 200 });
  field.setAttribute("aria-label", "Name of the conversation");
  const end = (keep) => {
    if (renaming !== about.id) return;
    renaming = null;
    field.remove();
    const title = field.value.trim();
    if (keep && title && title !== about.title) {
      Object.assign(about, { title, named: true });
      if (about.id === current.id) Object.assign(current.about, { title, named: true });
      store.save(about);
    }
    show();
    $("conversations").querySelector(`[data-id="${about.id}"] .open`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") end(false);
  });
  field.addEventListener("blur", () => end(true));
  return field;
}

async function remove(id) {
  const conversation = await read(id);
  if (!conversation) return;
  const at = shownRows().findIndex((row) => row.closest("li").dataset.id === id);
  conversation.deleted = true; // an answer under way does not bring it back
  running(id)?.controller.abort();
  const held = await store.remove(id);
  for (const message of held) if (!conversation.messages.has(message.id)) conversation.messages.set(message.id, message);
  listed = listed.filter((about) => about.id !== id);
  if (id === current.id) {
    openBlank();
    remember("");
  }
  show();
  const rows = shownRows();
  (rows[Math.min(at, rows.length - 1)] ?? $(NARROW.matches ? "close-list" : "search")).focus();
  const name = conversation.about.title || "Untitled";
  toast(`“${name}” was deleted.`, "Undo", async () => {
    conversation.deleted = false;
    await store.save(conversation.about, [...conversation.messages.values()]);
    listed = [...listed, conversation.about];
    open(conversation);
    remember(id);
    await refresh();
    announce(`${name} is back`);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Search

let searching = 0;
async function search() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const turn = ++searching;
  if (!words.length) {
    found = null;
    show();
    return;
  }
  const texts = new Map(listed.map((about) => [about.id, about.title]));
  const all = [...(await store.allMessages()), ...current.messages.values()];
  if (turn !== searching) return;
  for (const { conversation, content, files } of all) {
    if (texts.has(conversation)) texts.set(conversation, [texts.get(conversation), content, ...(files ?? []).map((file) => file.name)].join("\n"));
  }
  found = new Set([...texts].filter(([, text]) => words.every((word) => text.toLowerCase().includes(word))).map(([id]) => id));
  show();
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

async function exportThese(ids) {
  const conversations = (await Promise.all(ids.map(read))).filter(Boolean);
  const link = el("a");
  link.href = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
  const name = ids.length === 1 ? conversations[0].about.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) : "";
  link.download = `${name || "conversations"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function importFile(file) {
  let conversations;
  try {
    conversations = imported(await file.text());
  } catch (error) {
    toast(`${file.name} cannot be imported: ${error.message}.`, "OK", () => {});
    return;
  }
  const owners = new Map((await store.allMessages()).map((message) => [message.id, message.conversation]));
  for (const given of conversations) {
    const foreign = [...given.messages.keys()].some((id) => (owners.get(id) ?? given.id) !== given.id);
    if (foreign) {
      toast(`${file.name} cannot be imported: it has messages of another conversation.`, "OK", () => {});
      return;
    }
    const here = await read(given.id); // what is here stays, and what is new comes to it
    if (here) {
      const news = [...given.messages.values()].filter((message) => !here.messages.has(message.id));
      news.forEach((message) => here.messages.set(message.id, message));
      await store.save(here.about, news);
    } else {
      listed = [...listed, given.about];
      await store.save(given.about, [...given.messages.values()]);
    }
  }
  await refresh();
  if (conversations.length) toast(`${conversations.length} imported.`, "Show", () => choose(conversations[0].id));
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and shut

const isOpen = () => document.body.classList.contains("listed");

function setOpen(yes) {
  document.body.classList.toggle("listed", yes);
  $("open-list").setAttribute("aria-expanded", yes);
  $("side").inert = !yes;
  $("page").inert = yes && NARROW.matches;
  if (!NARROW.matches) kept.write("listed", yes);
  if (yes && NARROW.matches) $("close-list").focus();
}

// On narrow screens, after something was chosen.
function close() {
  if (NARROW.matches && isOpen()) setOpen(false);
}

$("open-list").addEventListener("click", () => setOpen(!isOpen()));
for (const id of ["close-list", "shade"]) {
  $(id).addEventListener("click", () => {
    setOpen(false);
    $("open-list").focus();
  });
}
$("side").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && NARROW.matches) {
    event.stopPropagation();
    setOpen(false);
    $("open-list").focus();
  }
  const rows = shownRows();
  const at = rows.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && (at >= 0 || event.target === $("search"))) {
    event.preventDefault();
    (rows[at + step] ?? $("search")).focus();
  }
});
$("search").addEventListener("input", search);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") $("conversations").querySelector(".open")?.click();
});
$("new").addEventListener("click", fresh);
$("export-all").addEventListener("click", () => exportThese(listed.map((about) => about.id)));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  for (const file of $("import-file").files) await importFile(file);
  $("import-file").value = "";
});
NARROW.addEventListener("change", () => setOpen(!NARROW.matches && kept.read("listed", true)));

store.trouble = (text) => {
  $("notice").hidden = text === null;
  $("notice-text").textContent = text ?? "";
};
store.elsewhere = refresh;
changes.listed = (conversation) => {
  const { id, about, messages, deleted } = conversation;
  if (messages.size && !deleted) {
    if (conversation === current && !listed.some((one) => one.id === id)) remember(id);
    listed = [about, ...listed.filter((one) => one.id !== id)].sort((a, b) => b.updated - a.updated);
  }
  show();
};

// What was last looked at; a conversation of the time when there was one alone becomes the first.
export async function start() {
  setOpen(!NARROW.matches && kept.read("listed", true));
  const old = kept.read("messages", []).filter((m) => m && typeof m.content === "string" && ["user", "assistant"].includes(m.role));
  await refresh();
  if (old.length) {
    const conversation = new Conversation();
    let parent = "";
    for (const { role, content, reasoning, numbers } of old) parent = conversation.add(role, parent, { content, reasoning, numbers }).id;
    await store.save(conversation.about, [...conversation.messages.values()]);
    if (!store.unsaved.size) kept.forget("messages");
    remember(conversation.id);
    open(conversation);
    await refresh();
    return;
  }
  const last = sessionStorage.getItem("penstock.current") ?? kept.read("current", "");
  const conversation = last ? await read(last) : null;
  if (conversation?.messages.size) open(conversation);
  else openBlank();
}
