// Formulas and colours of code. The libraries, which are part of the package, are loaded when the first text needs them;
// until then, and for what they cannot read, the source is shown. No text becomes markup.

import { el } from "./dom.js";

const MOST_FORMULA = 10_000; // characters
const MOST_CODE = 60_000;

let katex = null;
let formulas = []; // that wait for the library
function loadFormulas() {
  katex = "loading";
  const style = el("link");
  style.rel = "stylesheet";
  style.href = "vendor/katex/katex.min.css";
  document.head.append(style);
  import("./vendor/katex/katex.min.js").then(() => {
    katex = globalThis.katex;
    for (const [place, tex, display] of formulas) fillFormula(place, tex, display);
    formulas = [];
  }, () => (katex = "missing"));
}

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 30, maxExpand: 500 };

function fillFormula(place, tex, display) {
  const drawn = el("span");
  try {
    katex.render(tex, drawn, { ...OPTIONS, displayMode: display, macros: {} });
  } catch (error) {
    place.classList.add("unread");
    place.title = error instanceof katex.ParseError ? error.rawMessage ?? error.message : "This formula cannot be shown";
    return;
  }
  place.replaceChildren(...drawn.childNodes);
}

export function formula(tex, display) {
  const place = el("span", display ? "math display" : "math", tex);
  if (tex.length > MOST_FORMULA) return place;
  if (katex === null) loadFormulas();
  if (katex === "loading") formulas.push([place, tex, display]);
  else if (katex !== "missing") fillFormula(place, tex, display);
  return place;
}

let colours = null;
let codes = [];
function loadColours() {
  colours = "loading";
  import("./vendor/highlight/highlight.min.js").then((module) => {
    colours = module.default;
    for (const [place, code, language] of codes) fillCode(place, code, language);
    codes = [];
  }, () => (colours = "missing"));
}

function fillCode(place, code, language) {
  if (!colours.getLanguage(language)) return;
  try {
    const found = colours.highlight(code, { language, ignoreIllegals: true });
    if (found.value) place.replaceChildren(...found._emitter.rootNode.children.map(coloured));
  } catch {
    // it stays as it is
  }
}

const coloured = (part) =>
  typeof part === "string" ? part : el("span", part.scope ? `hl-${part.scope.split(/[.:]/)[0]}` : "", ...part.children.map(coloured));

export function code(text, language) {
  const place = el("code", "", text);
  if (!language || text.length > MOST_CODE) return place;
  if (colours === null) loadColours();
  if (colours === "loading") codes.push([place, text, language]);
  else if (colours !== "missing") fillCode(place, text, language);
  return place;
}
