// The conversation on the page, and asking the server for answers. An answer goes on in its conversation while another
// one is looked at.

import { $, action, announce, copied, el, ICONS } from "./dom.js";
import { attached, chip, setAttached, withFiles } from "./files.js";
import { added, strip } from "./heat.js";
import { render } from "./markdown.js";
import { asJson, call, events } from "./server.js";
import { options, settings } from "./settings.js";
import { askKey, measure, reachable, state } from "./status.js";
import { store } from "./store.js";
import { Conversation } from "./tree.js";

const SAVED_EVERY = 2000; // milliseconds of an answer that may be lost with the page

export let current = new Conversation();
let blank = current; // the next new one
let editing = null; // the message that is being written anew
let setAside = null; // what was written before that
const runs = new Map(); // by conversation: the answer under way and its AbortController
const drafts = new Map(); // by conversation: what was written and not sent

export const changes = { listed: () => {} }; // called with a conversation that may look different in the list

export const running = (id = current.id) => runs.get(id) ?? null;

// ---------------------------------------------------------------------------------------------------------------------
// Showing it

const list = $("messages");
let items = new Map(); // of messages that are shown

function shownPath() {
  return current.path(editing);
}

export function show(end = true) {
  const path = shownPath();
  items = new Map();
  list.replaceChildren(...path.map(shown));
  $("welcome").hidden = path.length > 0 || editing !== null;
  $("title").hidden = !$("welcome").hidden;
  $("title").textContent = current.about.title;
  $("editing").hidden = editing === null;
  busy();
  if (end) toEnd(true);
}

function shown(message) {
  const item = el("li", `message ${message.role}`, el("div", "thinking"), el("div", "body"), el("div", "trouble"), el("div", "foot"));
  item.setAttribute("aria-label", message.role === "user" ? "You" : "The model");
  items.set(message.id, item);
  fill(item, message);
  return item;
}

function fill(item, message) {
  const [thinking, body, trouble, foot] = item.children;
  const live = running(message.conversation)?.answer === message;
  if (message.role === "user") {
    const chips = (message.files ?? []).map((file) => chip(file));
    body.replaceChildren(...(chips.length ? [el("div", "chips", ...chips)] : []), message.content);
  } else {
    fillThought(thinking, message, live);
    const waiting = live && !message.content && !message.reasoning;
    body.hidden = !message.content;
    if (message.content) render(body, message.content);
    trouble.replaceChildren(...(waiting ? [el("div", "waiting", el("i"), el("i"), el("i"))] : []), ...(message.error ? [failure(message.error)] : []));
  }
  foot.replaceChildren(...footParts(message, live));
}

function failure(text) {
  const made = el("div", "failure", text);
  made.setAttribute("role", "alert");
  return made;
}

function fillThought(place, message, live) {
  if (!message.reasoning) {
    place.replaceChildren();
    return;
  }
  if (!place.firstChild) place.append(el("details", "thought", el("summary"), el("div")));
  const [summary, text] = place.firstChild.children;
  const seconds = message.thought ? ` for ${message.thought.toFixed(message.thought < 10 ? 1 : 0)} s` : "";
  summary.textContent = live && !message.content ? "Thinking…" : `Thought${seconds}`;
  text.textContent = message.reasoning;
}

function footParts(message, live) {
  const parts = [];
  if (message.numbers && message.role === "assistant") parts.push(el("span", "numbers", message.numbers));
  if (live) return parts;
  parts.push(...branches(message));
  if (message.content) parts.push(action("Copy", ICONS.copy, (button) => copied(button, message.content)));
  if (message.role === "user") {
    parts.push(action("Edit and send again", ICONS.pen, () => edit(message)));
    if (!running() && !current.children(message.id).length) parts.push(action("Answer", ICONS.again, () => state.ready && answerTo(message)));
  } else {
    parts.push(action("Answer again", ICONS.again, () => again(message)));
    if (message.cut && (message.content || message.reasoning) && message === shownPath().at(-1)) {
      const more = el("button", "more", "Continue");
      more.type = "button";
      more.title = "Go on with this answer";
      more.addEventListener("click", () => proceed(message));
      parts.push(more);
    }
  }
  if (message.heat) parts.push(strip(message.heat));
  return parts;
}

// ‹ 2/3 ›, where a message was edited or answered more than once.
function branches(message) {
  const all = current.siblings(message);
  if (all.length < 2) return [];
  const at = all.indexOf(message);
  const to = (step) => {
    if (running()) return;
    current.choose(all[at + step]);
    store.save(current.about);
    show(false);
    const item = items.get(all[at + step].id);
    const [back, forth] = item.querySelectorAll(".branches button");
    const kept = step < 0 ? back : forth;
    (kept.disabled ? (step < 0 ? forth : back) : kept).focus();
    announce(`Version ${at + step + 1} of ${all.length}`);
  };
  const back = action("Version before", ICONS.back, () => to(-1));
  const forth = action("Version after", ICONS.forth, () => to(1));
  back.disabled = at === 0;
  forth.disabled = at === all.length - 1;
  return [el("span", "branches", back, el("span", "", `${at + 1}/${all.length}`), forth)];
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
// Which conversation

export function open(conversation) {
  drafts.set(current.id, { ...written(), editing, setAside });
  current = conversation;
  const draft = drafts.get(conversation.id) ?? { text: "", files: [], editing: null, setAside: null };
  editing = conversation.messages.get(draft.editing?.id) ?? null;
  setAside = editing ? draft.setAside : null;
  write(draft);
  show();
  changes.listed(conversation);
}

// A conversation without messages; what was written there and not sent is there again.
export function openBlank() {
  if (blank.messages.size) blank = new Conversation();
  if (current !== blank) open(blank);
}

const written = () => ({ text: $("input").value, files: attached });

function write({ text, files }) {
  $("input").value = text;
  setAttached(files);
  grow();
}

// Not on touch screens, where a keyboard would come with it.
export function focusInput() {
  if (matchMedia("(hover: hover)").matches) $("input").focus();
}

// A conversation that is in the middle of an answer is the one that is being written to.
export const opened = (id) => (id === current.id ? current : runs.get(id)?.conversation ?? null);

// ---------------------------------------------------------------------------------------------------------------------
// Asking

// The conversation up to an answer, and with it if that is to go on.
function request(conversation, answer, continued) {
  const path = [];
  for (let at = continued ? answer : conversation.messages.get(answer.parent); at; at = conversation.messages.get(at.parent)) path.unshift(at);
  const messages = path
    .filter((m) => m.role === "user" || m.content || (continued && m === answer))
    .map((m) => (m.role === "user" ? { role: "user", content: withFiles(m.content, m.files) } : { role: "assistant", content: m.content }));
  if (continued && answer.reasoning) messages.at(-1).reasoning_content = answer.reasoning;
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { messages, stream: true, stream_options: { include_usage: true }, ...options() };
  if (state.heat) body.expert_heat = true;
  if (continued) {
    body.continue_final_message = true;
    delete body.response_format; // it would begin anew
  }
  return body;
}

async function ask(conversation, answer, continued = false) {
  const run = { conversation, answer, controller: new AbortController() };
  runs.set(conversation.id, run);
  delete answer.cut;
  delete answer.error;
  delete answer.numbers;
  const draw = () => {
    drawn = false;
    if (runs.get(conversation.id) !== run) return;
    if (count > 1) answer.numbers = `${((1000 * (count - 1)) / (performance.now() - first)).toFixed(1)} tokens/s`;
    redraw(answer);
    if (performance.now() - saved > SAVED_EVERY && !conversation.deleted) {
      saved = performance.now();
      store.save(conversation.about, [{ ...answer, cut: "interrupted" }]);
    }
  };
  const start = performance.now();
  let saved = start;
  let first = 0;
  let count = 0;
  let drawn = false;
  let counts = null; // of experts
  if (conversation === current) {
    following = true;
    show();
  }
  changes.listed(conversation);

  try {
    const response = await call("v1/chat/completions", { ...asJson(request(conversation, answer, continued)), signal: run.controller.signal });
    reachable(true);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) answer.numbers = numbers(event, first - start, answer.cut);
      if (event.expert_heat) counts = event.expert_heat.counts;
      const delta = event.choices[0]?.delta;
      if (event.choices[0]?.finish_reason === "length") answer.cut = "length";
      const reasoning = delta?.reasoning_content ?? delta?.reasoning ?? "";
      if (!delta?.content && !reasoning) continue;
      first ||= performance.now();
      count += 1;
      if (delta.content && answer.reasoning && !answer.content) answer.thought = (performance.now() - first) / 1000;
      answer.reasoning = (answer.reasoning ?? "") + reasoning;
      answer.content += delta.content ?? "";
      if (!drawn) {
        drawn = true;
        requestAnimationFrame(draw);
      }
    }
    if (counts?.length) answer.heat = added(continued ? answer.heat : null, counts);
    announce("The answer is complete.");
  } catch (error) {
    answer.cut = "stopped";
    if (error.name === "AbortError") answer.numbers = `stopped${answer.numbers ? `, ${answer.numbers}` : ""}`;
    else if (error.status === 401) unanswered(conversation, answer, continued);
    else if (error instanceof TypeError) {
      answer.error = "The server cannot be reached. Is it running?";
      reachable(false);
    } else answer.error = error.message;
  }
  runs.delete(conversation.id);
  conversation.about.updated = Date.now();
  redraw(answer);
  busy();
  changes.listed(conversation);
  measure();
  if (!conversation.deleted) await store.save(conversation.about, conversation.messages.has(answer.id) ? [answer] : []);
}

function redraw(answer) {
  const item = items.get(answer.id);
  if (!item || answer.conversation !== current.id) return;
  fill(item, answer);
  toEnd();
}

// The answer never was: the message goes back to where it was written, and a key is asked for.
function unanswered(conversation, answer, continued) {
  askKey();
  if (continued) return;
  const asked = conversation.messages.get(answer.parent);
  const gone = [answer, ...(conversation.siblings({ parent: asked.id }).length > 1 ? [] : [asked])];
  gone.forEach((message) => conversation.remove(message));
  store.removeMessages(gone.map((message) => message.id));
  if (conversation !== current) return;
  show();
  if (gone.includes(asked)) write({ text: asked.content, files: asked.files ?? [] });
}

function numbers(event, waited, cut) {
  const { usage, timings } = event;
  const parts = [`${usage.completion_tokens} tokens`];
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  parts.push(`first after ${waited < 1000 ? `${Math.round(waited)} ms` : `${(waited / 1000).toFixed(1)} s`}`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens reused`);
  if (cut === "length") parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}

export function send() {
  const text = $("input").value.trim();
  if (running() || !(text || attached.length) || !state.ready) return;
  const parent = editing ? editing.parent : current.path().at(-1)?.id ?? "";
  const message = current.add("user", parent, { content: text, ...(attached.length ? { files: attached } : {}) });
  endEditing();
  answerTo(message);
}

function answerTo(message) {
  const answer = current.add("assistant", message.id, { reasoning: "" });
  current.about.updated = Date.now();
  store.save(current.about, [message]);
  ask(current, answer);
}

export function stop() {
  running()?.controller.abort();
}

// Another answer beside this one; one that has nothing to show goes.
function again(answer) {
  if (running() || !state.ready) return;
  if (!answer.content && !answer.reasoning) {
    current.remove(answer);
    store.removeMessages([answer.id]);
  }
  answerTo(current.messages.get(answer.parent));
}

function proceed(answer) {
  if (running() || !state.ready) return;
  if (answer.content) answer.content = answer.content.trimEnd(); // as the server begins
  else answer.reasoning = answer.reasoning.trimEnd();
  ask(current, answer, true);
}

// Write a message anew, with what follows it set aside until it is sent or left as it was.
function edit(message) {
  if (running()) return;
  if (!editing) setAside = written();
  editing = message;
  write({ text: message.content, files: message.files ?? [] });
  show();
  $("input").focus();
}

// What was written before is there again.
function endEditing() {
  write((editing && setAside) || { text: "", files: [] });
  editing = setAside = null;
}

export function leaveEditing() {
  if (!editing) return;
  endEditing();
  show();
  $("input").focus();
}
$("editing-cancel").addEventListener("click", leaveEditing);

export function editLast() {
  const last = shownPath().findLast((message) => message.role === "user");
  if (last) edit(last);
  return Boolean(last);
}

function busy() {
  const on = running() !== null;
  document.body.classList.toggle("busy", on);
  $("send").title = on ? "Stop (Esc)" : "Send (Enter)";
  $("send").setAttribute("aria-label", on ? "Stop" : "Send");
  list.setAttribute("aria-busy", on);
  allow();
}

export function allow() {
  $("send").disabled = !running() && (!state.ready || !($("input").value.trim() || attached.length));
  for (const idea of $("ideas").children) idea.disabled = !state.ready;
}

export function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  allow();
}

addEventListener("pagehide", () => {
  for (const { conversation, answer } of runs.values()) store.save(conversation.about, [{ ...answer, cut: "interrupted" }]);
});
