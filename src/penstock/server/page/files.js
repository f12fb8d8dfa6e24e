// Text files that go with a message: chosen, dropped or pasted, shown as chips, sent as text.

import { $, action, announce, el, icon, ICONS, size, toast } from "./dom.js";

const MOST_BYTES = 512 * 1024; // of one file
const MOST_IN_ALL = 2 * 1024 * 1024;
const MOST_FILES = 10;

export let attached = [];

export function setAttached(files) {
  attached = [...files];
  show();
}

// The files of a message in front of what was written, each in a fence that it does not contain.
export function withFiles(content, files) {
  const parts = (files ?? []).map(({ name, text }) => {
    const ticks = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
    const fence = "`".repeat(ticks + 1);
    const language = /\.(\w{1,10})$/.exec(name)?.[1] ?? "";
    return `File: ${name}\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

// A chip of a file; `drop` takes it away, where that can be done.
export function chip(file, drop = null) {
  const open = el("button", "", icon(ICONS.file), el("span", "name", file.name), el("span", "size", size(new Blob([file.text]).size)));
  open.type = "button";
  open.title = `Show ${file.name}`;
  open.addEventListener("click", () => {
    $("file-title").textContent = file.name;
    $("file-text").textContent = file.text;
    $("file").showModal();
  });
  return el("span", "chip", open, ...(drop ? [action(`Remove ${file.name}`, ICONS.close, drop)] : []));
}

function show() {
  $("chips").replaceChildren(
    ...attached.map((file) =>
      chip(file, () => {
        setAttached(attached.filter((other) => other !== file));
        announce(`${file.name} removed`);
        $("input").focus();
      }),
    ),
  );
  $("chips").hidden = !attached.length;
  $("input").dispatchEvent(new Event("input"));
}

async function read(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${size(file.size)}, at most ${size(MOST_BYTES)} can be attached`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no text in UTF-8`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text`);
  return { name: file.name.slice(0, 200) || "text.txt", text };
}

export async function attach(files) {
  const troubles = [];
  for (const file of files) {
    try {
      const made = await read(file);
      if (attached.length >= MOST_FILES) throw new Error(`${file.name} is left out: a message has at most ${MOST_FILES} files`);
      const whole = attached.reduce((sum, other) => sum + other.text.length, made.text.length);
      if (whole > MOST_IN_ALL) throw new Error(`${file.name} is left out: the files of a message have at most ${size(MOST_IN_ALL)}`);
      attached = [...attached, made];
    } catch (error) {
      troubles.push(error.message);
    }
  }
  show();
  if (troubles.length) toast(troubles.join("; "), "OK", () => {});
  else if (files.length) announce(`${files.length} attached`);
  $("input").focus();
}

const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");

$("attach").addEventListener("click", () => $("attach-file").click());
$("attach-file").addEventListener("change", async () => {
  await attach([...$("attach-file").files]);
  $("attach-file").value = "";
});
$("input").addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});
document.addEventListener("dragover", (event) => {
  if (!carries(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  if (!carries(event)) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  attach([...event.dataTransfer.files]);
});
$("file").addEventListener("click", (event) => {
  if (event.target === $("file")) $("file").close();
});
