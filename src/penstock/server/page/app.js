// The chat page: a conversation with the server it came from. Plain JavaScript; what the model writes only ever becomes
// text nodes, never markup.
"use strict";

const $ = (id) => document.getElementById(id);
const el = (name, classes = "", ...children) => {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
};

// ---------------------------------------------------------------------------------------------------------------------
// What is kept in the browser

const DEFAULTS = { system: "", temperature: null, top_p: null, max_tokens: null, theme: "auto" }; // null: the server's own

const kept = {
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
};

const settings = { ...DEFAULTS, ...kept.read("settings", {}) };
let messages = kept.read("messages", []).filter((m) => m && typeof m.content === "string" && m.role);
let key = sessionStorage.getItem("penstock.key") ?? kept.read("key", "");

// ---------------------------------------------------------------------------------------------------------------------
// The server

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
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

// The data of the events of a stream, parsed, up to [DONE].
async function* events(response) {
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

// ---------------------------------------------------------------------------------------------------------------------
// Markdown, the part of it that models write

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s])?)\*\*|__([^\s_](?:[\s\S]*?[^\s])?)__|(?<![\w*])\*([^\s*](?:[^*\n]*?[^\s*])?)\*(?![\w*])|(?<!\w)_([^\s_](?:[^_\n]*?[^\s_])?)_(?!\w)|~~([\s\S]+?)~~|\[([^\]\n]+)\]\(((?:https?:\/\/|mailto:)[^\s)]+)\)|(https?:\/\/[^\s<>()\]]+[^\s<>()\].,;:!?'"])/;

function inline(parent, text) {
  let found;
  while (text && (found = INLINE.exec(text))) {
    parent.append(text.slice(0, found.index));
    const [whole, , code, strong, strong2, em, em2, struck, label, target, bare] = found;
    const wrapped = strong ?? strong2 ?? em ?? em2 ?? struck;
    if (code !== undefined) {
      parent.append(el("code", "", code.length > 2 && /^ .* $/.test(code) ? code.slice(1, -1) : code));
    } else if (wrapped !== undefined) {
      const made = el((strong ?? strong2) !== undefined ? "strong" : struck !== undefined ? "del" : "em");
      inline(made, wrapped);
      parent.append(made);
    } else {
      const link = el("a", "", label ?? bare);
      link.href = target ?? bare;
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
      parent.append(link);
    }
    text = text.slice(found.index + whole.length);
  }
  parent.append(text);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*).*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ROW = /^\s*\|(.+)\|\s*$/;
const DIVIDER = /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/;

function markdown(parent, text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  let at = 0;
  const special = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^\s*>/.test(line);
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) {
      at += 1;
    } else if ((found = FENCE.exec(line))) {
      const [, fence, language] = found;
      const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
      const code = [];
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) code.push(lines[at]);
      at += 1;
      parent.append(codeBlock(code.join("\n"), language));
    } else if ((found = HEADING.exec(line))) {
      const heading = el(`h${Math.min(4, found[1].length)}`);
      inline(heading, found[2]);
      parent.append(heading);
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(el("hr"));
      at += 1;
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; at < lines.length && /^\s*>/.test(lines[at]); at += 1) quoted.push(lines[at].replace(/^\s*> ?/, ""));
      const quote = el("blockquote");
      markdown(quote, quoted.join("\n"));
      parent.append(quote);
    } else if (ITEM.test(line)) {
      at = list(parent, lines, at);
    } else if (ROW.test(line) && at + 1 < lines.length && DIVIDER.test(lines[at + 1])) {
      at = table(parent, lines, at);
    } else {
      const paragraph = [];
      for (; at < lines.length && lines[at].trim() && (!paragraph.length || !special(lines[at])); at += 1) paragraph.push(lines[at]);
      const made = el("p");
      paragraph.forEach((part, n) => {
        if (n) made.append(/ {2,}$/.test(paragraph[n - 1]) ? el("br") : "\n");
        inline(made, part.trim());
      });
      parent.append(made);
    }
  }
}

// A list from lines[at] on; what is indented deeper belongs to the item above it. Returns where it ends.
function list(parent, lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const made = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) made.start = parseInt(mark, 10);
  const depth = indent.length;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length < depth || /\d/.test(found[2]) !== ordered) break;
    const inside = [found[3]];
    for (at += 1; at < lines.length; at += 1) {
      const next = ITEM.exec(lines[at]);
      const deeper = /^\s*/.exec(lines[at])[0].length > depth;
      if (!lines[at].trim()) {
        const after = lines.slice(at + 1).find((l) => l.trim());
        if (after === undefined || /^\s*/.exec(after)[0].length <= depth) break;
      } else if (next ? next[1].length <= depth : !deeper && (HEADING.test(lines[at]) || FENCE.test(lines[at]))) break;
      inside.push(lines[at].replace(new RegExp(`^\\s{0,${depth + 4}}`), (space) => (next ? space.slice(Math.min(space.length, depth + 2)) : "")));
    }
    const item = el("li");
    const [first, ...rest] = inside;
    inline(item, first);
    if (rest.some((l) => l.trim())) markdown(item, rest.join("\n"));
    made.append(item);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "") && ITEM.exec(lines[at + 1])[1].length >= depth) at += 1;
  }
  parent.append(made);
  return at;
}

function table(parent, lines, at) {
  const cells = (line) => ROW.exec(line)[1].split("|").map((cell) => cell.trim());
  const row = (kind, texts) => {
    const made = el("tr");
    for (const text of texts) {
      const cell = el(kind);
      inline(cell, text);
      made.append(cell);
    }
    return made;
  };
  const made = el("table", "", el("thead", "", row("th", cells(lines[at]))));
  const rows = el("tbody");
  for (at += 2; at < lines.length && ROW.test(lines[at]); at += 1) rows.append(row("td", cells(lines[at])));
  made.append(rows);
  parent.append(el("div", "table", made));
  return at;
}

function codeBlock(code, language) {
  const copy = el("button", "", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => copied(copy, code));
  return el("div", "block", el("header", "", el("span", "", language || "text"), copy), el("pre", "", el("code", "", code)));
}

async function copied(button, text) {
  const before = [...button.childNodes];
  try {
    await navigator.clipboard.writeText(text);
    button.replaceChildren(before[0].nodeType === Node.TEXT_NODE ? "Copied" : icon("M5 12.5l4.5 4.5L19 7.5"));
  } catch {
    button.replaceChildren("Not allowed here");
  }
  setTimeout(() => button.replaceChildren(...before), 1200);
}

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

const COPY = "M9 9h10v11H9zM15 9V5H5v10h4";
const AGAIN = "M19 12a7 7 0 1 1-2.1-5M19 4v4h-4";
const PEN = "M5 19l1-4L16 5l3 3L9 18l-4 1z";

function action(title, path, act) {
  const button = el("button", "", icon(path));
  button.type = "button";
  button.title = title;
  button.setAttribute("aria-label", title);
  button.addEventListener("click", () => act(button));
  return button;
}

// ---------------------------------------------------------------------------------------------------------------------
// The conversation on the page

const list_ = $("messages");

function show() {
  list_.replaceChildren(...messages.map(shown));
  $("welcome").hidden = messages.length > 0;
  toEnd(true);
}

function shown(message, index) {
  const item = el("li", `message ${message.role}`);
  item.setAttribute("aria-label", message.role === "user" ? "You" : "The model");
  fill(item, message, index, false);
  return item;
}

function fill(item, message, index, live) {
  const parts = [];
  if (message.reasoning) parts.push(thought(item, message, live));
  const body = el("div", "body");
  if (message.role === "user") body.append(message.content);
  else markdown(body, message.content);
  if (message.content || message.role === "user") parts.push(body);
  else if (live && !message.reasoning) parts.push(el("div", "waiting", el("i"), el("i"), el("i")));
  if (message.error) {
    const failure = el("div", "failure", message.error);
    failure.setAttribute("role", "alert");
    parts.push(failure);
  }
  parts.push(foot(message, index, live));
  item.replaceChildren(...parts);
}

function thought(item, message, live) {
  const open = item.querySelector("details.thought")?.open ?? false;
  const thinking = live && !message.content;
  const seconds = message.thought ? ` for ${message.thought.toFixed(message.thought < 10 ? 1 : 0)} s` : "";
  const details = el("details", "thought", el("summary", "", thinking ? "Thinking…" : `Thought${seconds}`), el("div", "", message.reasoning));
  details.open = open;
  return details;
}

function foot(message, index, live) {
  const line = el("div", "foot");
  if (message.role === "user") {
    line.append(action("Copy", COPY, (button) => copied(button, message.content)));
    line.append(action("Edit and send again", PEN, () => edit(index)));
    return line;
  }
  if (message.numbers) line.append(el("span", "numbers", message.numbers));
  if (live) return line;
  if (message.content) line.append(action("Copy", COPY, (button) => copied(button, message.content)));
  line.append(action("Answer again", AGAIN, () => again(index)));
  return line;
}

function toEnd(always = false) {
  const view = $("scroller");
  if (always || following) view.scrollTop = view.scrollHeight;
  $("down").hidden = atEnd();
}

const atEnd = () => $("scroller").scrollHeight - $("scroller").scrollTop - $("scroller").clientHeight < 40;
let following = true;
$("scroller").addEventListener("scroll", () => {
  following = atEnd();
  $("down").hidden = following;
});
$("down").addEventListener("click", () => {
  following = true;
  toEnd(true);
});

// ---------------------------------------------------------------------------------------------------------------------
// Asking

let running = null; // the AbortController of the answer under way

function request() {
  const asked = messages.filter((m) => m.role === "user" || m.content).map(({ role, content }) => ({ role, content }));
  if (asked.at(-1)?.role === "assistant") asked.pop();
  if (settings.system.trim()) asked.unshift({ role: "system", content: settings.system });
  const body = { messages: asked, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== null) body[name] = settings[name];
  return body;
}

async function ask() {
  const answer = { role: "assistant", content: "", reasoning: "" };
  messages.push(answer);
  const item = shown(answer, messages.length - 1);
  fill(item, answer, messages.length - 1, true);
  list_.append(item);
  $("welcome").hidden = true;
  running = new AbortController();
  busy(true);
  following = true;
  toEnd(true);

  const start = performance.now();
  let first = 0;
  let count = 0;
  let cut = false; // by the limit of tokens
  let drawn = false;
  const draw = () => {
    drawn = false;
    if (running === null) return;
    if (count > 1) answer.numbers = `${((1000 * (count - 1)) / (performance.now() - first)).toFixed(1)} tokens/s`;
    fill(item, answer, messages.length - 1, true);
    toEnd();
  };
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    reachable(true);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) answer.numbers = numbers(event, first - start, cut);
      const delta = event.choices[0]?.delta;
      if (event.choices[0]?.finish_reason === "length") cut = true;
      const reasoning = delta?.reasoning_content ?? delta?.reasoning ?? "";
      if (!delta?.content && !reasoning) continue;
      first ||= performance.now();
      count += 1;
      if (delta.content && answer.reasoning && !answer.content) answer.thought = (performance.now() - first) / 1000;
      answer.reasoning += reasoning;
      answer.content += delta.content ?? "";
      if (!drawn) {
        drawn = true;
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") answer.numbers = `stopped${answer.numbers ? `, ${answer.numbers}` : ""}`;
    else if (error.status === 401) unanswered(answer, askKey);
    else if (error instanceof TypeError) {
      answer.error = "The server cannot be reached. Is it running?";
      reachable(false);
    } else answer.error = error.message;
  }
  running = null;
  busy(false);
  kept.write("messages", messages);
  const index = messages.indexOf(answer);
  if (index >= 0) fill(item, answer, index, false);
  else item.remove();
  toEnd();
  measure();
}

// The answer never was: the message goes back to where it was written, and something is done about it.
function unanswered(answer, then) {
  messages = messages.filter((m) => m !== answer);
  const last = messages.pop();
  show();
  $("input").value = last?.content ?? "";
  grow();
  then();
}

function numbers(event, waited, cut) {
  const { usage, timings } = event;
  const parts = [`${usage.completion_tokens} tokens`];
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  parts.push(`first after ${waited < 1000 ? `${Math.round(waited)} ms` : `${(waited / 1000).toFixed(1)} s`}`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens reused`);
  if (cut) parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}

function send() {
  const text = $("input").value.trim();
  if (running || !text || !ready) return;
  messages.push({ role: "user", content: text });
  list_.append(shown(messages.at(-1), messages.length - 1));
  kept.write("messages", messages);
  $("input").value = "";
  grow();
  ask();
}

function stop() {
  running?.abort();
}

function again(index) {
  if (running) return;
  messages.length = index;
  show();
  ask();
}

function edit(index) {
  if (running) return;
  $("input").value = messages[index].content;
  messages.length = index;
  kept.write("messages", messages);
  show();
  grow();
  $("input").focus();
}

function busy(on) {
  document.body.classList.toggle("busy", on);
  $("send").title = on ? "Stop (Esc)" : "Send (Enter)";
  $("send").setAttribute("aria-label", on ? "Stop" : "Send");
  list_.setAttribute("aria-busy", on);
  allow();
}

function allow() {
  $("send").disabled = !running && (!ready || !$("input").value.trim());
  for (const idea of $("ideas").children) idea.disabled = !ready;
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  allow();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send();
});
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("input").value && !running) {
    const last = messages.findLastIndex((m) => m.role === "user");
    if (last >= 0) {
      event.preventDefault();
      edit(last);
    }
  }
});
document.addEventListener("keydown", (event) => {
  const writing = event.target.matches("input, textarea, select") || document.querySelector("dialog[open]");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  if (event.key === "/" && !writing) {
    event.preventDefault();
    $("input").focus();
  }
});
for (const idea of $("ideas").children) {
  idea.addEventListener("click", () => {
    $("input").value = idea.textContent;
    send();
  });
}
$("new").addEventListener("click", () => {
  stop();
  messages = [];
  kept.write("messages", messages);
  show();
  $("input").focus();
});

// ---------------------------------------------------------------------------------------------------------------------
// The state of the server

let ready = false;
let looking = null;

function reachable(yes) {
  $("banner").hidden = yes;
  if (yes) return;
  ready = false;
  allow();
  $("banner-text").textContent = "The server cannot be reached.";
  $("dot").className = "dot bad";
  $("model").title = "The server cannot be reached";
  look(2000);
}

function look(after = 0) {
  clearTimeout(looking);
  looking = setTimeout(connect, after);
}

// Ask until the server is there and its model is loaded.
async function connect() {
  let health;
  try {
    health = await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    reachable(false);
    return;
  }
  $("banner").hidden = true;
  if (health.status === "ok") {
    await connected();
  } else {
    const failed = health.status !== "loading";
    $("dot").className = failed ? "dot bad" : "dot";
    $("model-name").textContent = failed ? "no model" : "loading";
    $("loading").hidden = failed;
    $("loading-bar").value = health.progress;
    $("loading-text").textContent = health.error?.message ?? "";
    if (failed) {
      $("banner").hidden = false;
      $("banner-text").textContent = health.error?.message ?? health.status;
    }
    look(failed ? 5000 : 500);
  }
}

async function connected() {
  try {
    const { data } = await (await call("v1/models")).json();
    const model = data[0];
    $("loading").hidden = true;
    $("model-name").textContent = model.id;
    $("dot").className = "dot ok";
    const size = model.meta ? `${(model.meta.n_params / 1e9).toFixed(model.meta.n_params < 1e9 ? 3 : 1)} billion parameters, context of ${model.meta.n_ctx} tokens` : "";
    $("model").title = size;
    document.title = `${model.id} · penstock`;
    ready = true;
    allow();
    measure();
  } catch (error) {
    if (error.status === 401) askKey();
    else look(2000);
  }
}

function askKey() {
  $("key-wrong").hidden = !key;
  $("key-input").value = "";
  if (!$("key").open) $("key").showModal();
}

$("key").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", () => {
  key = $("key-input").value.trim();
  sessionStorage.setItem("penstock.key", key);
  kept.write("key", $("key-keep").checked ? key : "");
  look();
});
$("banner-retry").addEventListener("click", () => look());

// Numbers of /metrics by name, those with labels left out.
function metrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const parts = /^penstock:(\w+) (\S+)$/.exec(line);
    if (parts) found[parts[1]] = Number(parts[2]);
  }
  return found;
}

const bytes = (n) => (n < 1e9 ? `${(n / 1e6).toFixed(0)} MB` : `${(n / 1e9).toFixed(1)} GB`);

function gauge(name, share, text) {
  const shown = $(`gauge-${name}`);
  shown.hidden = text === null;
  if (text === null) return;
  const meter = shown.querySelector("meter");
  if (meter) meter.value = share;
  shown.querySelector("output").textContent = text;
}

let before = null;
let measuring = null;

async function measure() {
  clearTimeout(measuring);
  if (!ready || document.hidden) return;
  try {
    const now = metrics(await (await call("metrics")).text());
    const whole = now.memory_peak_bytes + now.memory_available_bytes;
    gauge("memory", now.memory_peak_bytes / whole, whole ? `${bytes(now.memory_peak_bytes)} of ${bytes(whole)}` : null);
    gauge("pages", now.kv_cache_usage_ratio, now.kv_pages_total ? `${(100 * now.kv_cache_usage_ratio).toFixed(1)} %` : null);
    const missed = (now.expert_host_hits_total ?? 0) + (now.expert_reads_total ?? 0);
    const tried = (now.expert_hits_total ?? 0) + missed;
    const hits = tried ? now.expert_hits_total / tried : 0;
    gauge("experts", hits, tried ? `${(100 * hits).toFixed(0)} %` : null);
    const waiting = now.requests_deferred ? `, ${now.requests_deferred} waiting` : "";
    gauge("queue", 0, now.requests_processing ? `${now.requests_processing} running${waiting}` : null);
    const at = performance.now();
    const written = before ? now.tokens_predicted_total - before.written : 0;
    gauge("speed", 0, written > 0 && now.requests_processing ? `${((1000 * written) / (at - before.at)).toFixed(0)} tokens/s in all` : null);
    before = { at, written: now.tokens_predicted_total };
  } catch (error) {
    if (error instanceof TypeError) {
      reachable(false);
      return;
    }
    if (error.status === 404) return; // started without
  }
  measuring = setTimeout(measure, 2000);
}
document.addEventListener("visibilitychange", () => {
  before = null;
  measure();
});

// ---------------------------------------------------------------------------------------------------------------------
// Settings

const RANGES = { temperature: [-0.05, (v) => v >= 0], top_p: [1.05, (v) => v <= 1] }; // where a slider means: the server's own

function dress() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

function fillSettings() {
  $("set-system").value = settings.system;
  $("set-max_tokens").value = settings.max_tokens ?? "";
  $("set-theme").value = settings.theme;
  for (const [name, [unset]] of Object.entries(RANGES)) {
    $(`set-${name}`).value = settings[name] ?? unset;
    $(`out-${name}`).textContent = settings[name] === null ? "server default" : settings[name].toFixed(2);
  }
}

function readSettings() {
  settings.system = $("set-system").value;
  settings.theme = $("set-theme").value;
  const limit = parseInt($("set-max_tokens").value, 10);
  settings.max_tokens = limit >= 1 ? limit : null;
  for (const [name, [, isSet]] of Object.entries(RANGES)) {
    const value = Number($(`set-${name}`).value);
    settings[name] = isSet(value) ? Math.round(value * 100) / 100 : null;
    $(`out-${name}`).textContent = settings[name] === null ? "server default" : settings[name].toFixed(2);
  }
  kept.write("settings", settings);
  dress();
}

$("open-settings").addEventListener("click", () => {
  fillSettings();
  $("settings").showModal();
});
$("settings").addEventListener("input", readSettings);
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close();
});
$("settings").addEventListener("close", () => $("input").focus());
$("reset-settings").addEventListener("click", () => {
  Object.assign(settings, DEFAULTS);
  kept.write("settings", settings);
  fillSettings();
  dress();
});

dress();
show();
grow();
connect();
