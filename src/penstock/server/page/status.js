// The state of the server: whether it is there, which model it has, what it is doing.

import { $, size } from "./dom.js";
import { call, hasKey, setKey } from "./server.js";
import { learn } from "./settings.js";

export const state = { ready: false, heat: false, changed: () => {} };

let looking = null;

export function reachable(yes) {
  $("banner").hidden = yes;
  if (yes) return;
  state.ready = false;
  state.changed();
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
export async function connect() {
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
    learn(await (await call("props")).json());
    const model = data[0];
    const { n_params: count, n_ctx: context, expert_layers: layers } = model.meta ?? {};
    $("loading").hidden = true;
    $("model-name").textContent = model.id;
    $("dot").className = "dot ok";
    const about = count ? `${(count / 1e9).toFixed(count < 1e9 ? 3 : 1)} billion parameters, context of ${context} tokens` : "";
    $("model").title = [model.id, about].filter(Boolean).join(": ");
    $("about-model").textContent = $("model").title;
    document.title = `${model.id} · penstock`;
    state.heat = layers?.length > 0;
    state.ready = true;
    state.changed();
    measure();
  } catch (error) {
    if (error.status === 401) askKey();
    else look(2000);
  }
}

export function askKey() {
  $("key-wrong").hidden = !hasKey();
  $("key-input").value = "";
  if (!$("key").open) $("key").showModal();
}

$("key").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", () => {
  setKey($("key-input").value.trim(), $("key-keep").checked);
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

export async function measure() {
  clearTimeout(measuring);
  if (!state.ready || document.hidden) return;
  try {
    const now = metrics(await (await call("metrics")).text());
    const whole = now.memory_peak_bytes + now.memory_available_bytes;
    gauge("memory", now.memory_peak_bytes / whole, whole ? `${size(now.memory_peak_bytes)} of ${size(whole)}` : null);
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
