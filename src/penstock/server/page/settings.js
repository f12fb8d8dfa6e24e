// Settings: how answers are drawn, and how the page looks. null stands for the server's own: it is not sent.

import { $, el } from "./dom.js";
import { kept } from "./store.js";

// Sliders: least, most, step, what the server does if nobody says anything.
const SLIDERS = {
  temperature: ["Temperature", 0, 2, 0.05, 0],
  top_p: ["Top-p", 0, 1, 0.05, 1],
  top_k: ["Top-k", 0, 200, 1, 0],
  min_p: ["Min-p", 0, 1, 0.01, 0],
  repetition_penalty: ["Repetition penalty", 0.5, 2, 0.01, 1],
  presence_penalty: ["Presence penalty", -2, 2, 0.1, 0],
  frequency_penalty: ["Frequency penalty", -2, 2, 0.1, 0],
};
const NUMBERS = { max_tokens: 1, seed: 0 }; // and the least of each

const DEFAULTS = { system: "", theme: "auto", thinking: "auto", json: false };
for (const name of [...Object.keys(SLIDERS), ...Object.keys(NUMBERS)]) DEFAULTS[name] = null;

export const settings = { ...DEFAULTS, ...kept.read("settings", {}) };

let known = {}; // defaults of the server
let switches = null; // how the chat template is told to think or not: "enable_thinking", "thinking", "reasoning_effort"

// What is sent with a request.
export function options() {
  const body = {};
  for (const name of [...Object.keys(SLIDERS), ...Object.keys(NUMBERS)]) if (settings[name] !== null) body[name] = settings[name];
  if (settings.json) body.response_format = { type: "json_object" };
  if (settings.thinking !== "auto" && switches) {
    const on = settings.thinking === "on";
    if (switches === "reasoning_effort") body.reasoning_effort = on ? "high" : "minimal";
    else body.chat_template_kwargs = { [switches]: on };
  }
  return body;
}

// What /props says: defaults, and whether the model's template knows of thinking.
export function learn(props) {
  known = props.default_generation_settings?.params ?? {};
  const template = props.chat_template ?? "";
  switches = ["enable_thinking", "reasoning_effort", "thinking"].find((name) => new RegExp(`\\{[%{][^}]*(?<![.\\w'"])${name}\\b`).test(template)) ?? null;
  $("row-thinking").hidden = switches === null;
  $("set-thinking").querySelector("[value=off]").textContent = switches === "reasoning_effort" ? "little" : "off";
  $("set-thinking").querySelector("[value=on]").textContent = switches === "reasoning_effort" ? "much" : "on";
  fill();
}

function dress() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

const digits = (name) => (SLIDERS[name][3] >= 1 ? 0 : 2);

function slider(name, [label, least, most, step]) {
  const range = el("input");
  Object.assign(range, { id: `set-${name}`, type: "range", min: least, max: most, step });
  const box = el("input");
  Object.assign(box, { id: `default-${name}`, type: "checkbox" });
  const own = el("label", "own", box, "server default");
  const title = el("label", "title", label);
  title.htmlFor = range.id;
  const out = el("output");
  Object.assign(out, { id: `out-${name}` });
  out.setAttribute("for", range.id);
  range.addEventListener("input", () => (box.checked = false)); // whoever moves it wants the value
  box.setAttribute("aria-label", `${label}: server default`);
  return el("div", "slider", title, out, own, range);
}

function fill() {
  $("set-system").value = settings.system;
  $("set-theme").value = settings.theme;
  $("set-thinking").value = settings.thinking;
  $("set-json").checked = settings.json;
  for (const name of Object.keys(NUMBERS)) {
    $(`set-${name}`).value = settings[name] ?? "";
    $(`set-${name}`).placeholder = known[name] === undefined ? "server default" : `server default (${known[name]})`;
  }
  for (const [name, [, , , , neutral]] of Object.entries(SLIDERS)) {
    $(`set-${name}`).value = settings[name] ?? known[name] ?? neutral;
    $(`default-${name}`).checked = settings[name] === null;
    label(name);
  }
}

function label(name) {
  const own = settings[name] === null;
  $(`out-${name}`).textContent = (settings[name] ?? known[name] ?? SLIDERS[name][4]).toFixed(digits(name));
  $(`set-${name}`).closest(".slider").classList.toggle("unset", own);
}

function read() {
  settings.system = $("set-system").value;
  settings.theme = $("set-theme").value;
  settings.thinking = $("set-thinking").value;
  settings.json = $("set-json").checked;
  for (const [name, least] of Object.entries(NUMBERS)) {
    const value = parseInt($(`set-${name}`).value, 10);
    settings[name] = value >= least ? value : null;
  }
  for (const [name, [, , , , neutral]] of Object.entries(SLIDERS)) {
    const own = $(`default-${name}`).checked;
    settings[name] = own ? null : Number(Number($(`set-${name}`).value).toFixed(2));
    if (own) $(`set-${name}`).value = known[name] ?? neutral;
    label(name);
  }
  kept.write("settings", settings);
  dress();
}

$("sliders").append(...Object.entries(SLIDERS).map(([name, about]) => slider(name, about)));
$("open-settings").addEventListener("click", () => {
  fill();
  $("settings").showModal();
});
$("settings").addEventListener("input", read);
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close();
});
$("settings").addEventListener("close", () => $("input").focus());
$("reset-settings").addEventListener("click", () => {
  Object.assign(settings, DEFAULTS);
  kept.write("settings", settings);
  fill();
  dress();
});

dress();
