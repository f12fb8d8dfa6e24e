// Markdown, the part of it that models write, as elements. What the model writes only ever becomes text nodes, never markup.
//
// A text is cut into blocks first. `render` keeps the elements of those that have not changed, so that an answer which
// grows costs its last block alone, and a selection or a scrolled block of code stays as it is.

import { copied, el } from "./dom.js";
import { code, formula } from "./rich.js";

// Spans are bounded: what is opened again and again and never closed would be looked through to its end each time.
const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<code>[\s\S]{0,2000}?[^`])\k<ticks>(?!`)/,
    /\\\((?<round>[^\n]{1,2000}?)\\\)|\\\[(?<square>[^\n]{1,2000}?)\\\]|\$\$(?<dollars>[^\n$]{1,2000}?)\$\$/,
    /(?<![\w\\$])\$(?<dollar>[^\s$](?:[^\n$]{0,2000}?[^\s$\\])?)\$(?![\w$])/,
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /\*\*(?<strong>[^\s*](?:[\s\S]{0,2000}?[^\s])?)\*\*|__(?<strong2>[^\s_](?:[\s\S]{0,2000}?[^\s])?)__/,
    /(?<![\w*])\*(?<em>[^\s*](?:[^*\n]{0,2000}?[^\s*])?)\*(?![\w*])|(?<!\w)_(?<em2>[^\s_](?:[^_\n]{0,2000}?[^\s_])?)_(?!\w)/,
    /~~(?<struck>[\s\S]{1,2000}?)~~/,
    /\[(?<label>[^\]\n]{1,500})\]\((?<target>(?:https?:\/\/|mailto:)[^\s)]+)\)|(?<bare>https?:\/\/[^\s<>()\]]+[^\s<>()\].,;:!?'"])/,
  ]
    .map((part) => part.source)
    .join("|"),
);

function inline(parent, text) {
  let found;
  while (text && (found = INLINE.exec(text))) {
    parent.append(text.slice(0, found.index), inlineElement(found.groups));
    text = text.slice(found.index + found[0].length);
  }
  parent.append(text);
}

function inlineElement(found) {
  if (found.code !== undefined) return el("code", "", found.code.length > 2 && /^ .* $/.test(found.code) ? found.code.slice(1, -1) : found.code);
  if (found.escaped !== undefined) return found.escaped;
  const tex = found.round ?? found.dollar;
  if (tex !== undefined) return formula(tex, false);
  const display = found.square ?? found.dollars;
  if (display !== undefined) return formula(display, true);
  const strong = found.strong ?? found.strong2;
  const wrapped = strong ?? found.em ?? found.em2 ?? found.struck;
  if (wrapped !== undefined) {
    const made = el(strong !== undefined ? "strong" : found.struck !== undefined ? "del" : "em");
    inline(made, wrapped);
    return made;
  }
  const link = el("a", "", found.label ?? found.bare);
  link.href = found.target ?? found.bare;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*).*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TASK = /^\[([ xX])\]\s+/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const QUOTE = /^\s*>/;
const ROW = /^\s*\|(.+)\|\s*$/;
const DIVIDER = /^\s*\|\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const FORMULA = { "$$": "$$", "\\[": "\\]" };
const opensFormula = (line) => /^\s*(\$\$|\\\[)/.exec(line)?.[1];

// Where a formula that begins at lines[at] ends, behind its last line; 0 if it does not.
function formulaEnd(lines, at) {
  const opening = opensFormula(lines[at]);
  if (!opening) return 0;
  for (let end = at; end < lines.length && (end === at || lines[end].trim()); end += 1) {
    const line = end === at ? lines[end].slice(lines[end].indexOf(opening) + 2) : lines[end];
    const closing = line.indexOf(FORMULA[opening]);
    if (closing >= 0) return line.slice(closing + 2).trim() && end === at ? 0 : end + 1;
  }
  return 0;
}

const special = (line) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(line)) || opensFormula(line);

// The blocks of a text: what each is, and its lines.
function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const begin = at;
    let kind = "paragraph";
    let end;
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (at += 1; at < lines.length && !closing.test(lines[at]); at += 1);
      kind = at < lines.length ? "code" : "open code";
      at += 1;
    } else if (HEADING.test(line)) {
      [kind, at] = ["heading", at + 1];
    } else if (RULE.test(line)) {
      [kind, at] = ["rule", at + 1];
    } else if (QUOTE.test(line)) {
      for (kind = "quote"; at < lines.length && QUOTE.test(lines[at]); at += 1);
    } else if (ITEM.test(line)) {
      [kind, at] = ["list", listEnd(lines, at)];
    } else if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "")) {
      for (kind = "table", at += 2; at < lines.length && ROW.test(lines[at]); at += 1);
    } else if ((end = formulaEnd(lines, at))) {
      [kind, at] = ["formula", end];
    } else {
      for (at += 1; at < lines.length && lines[at].trim() && !special(lines[at]); at += 1);
    }
    found.push({ kind, lines: lines.slice(begin, at) });
  }
  return found;
}

const MAKERS = {
  paragraph(lines) {
    const made = el("p");
    lines.forEach((part, n) => {
      if (n) made.append(/ {2,}$|\\$/.test(lines[n - 1]) ? el("br") : "\n");
      inline(made, part.trim().replace(/\\$/, ""));
    });
    return made;
  },
  code: (lines) => codeBlock(lines, true),
  "open code": (lines) => codeBlock(lines, false),
  heading(lines) {
    const [, marks, text] = HEADING.exec(lines[0]);
    const made = el(`h${Math.min(4, marks.length)}`);
    inline(made, text);
    return made;
  },
  rule: () => el("hr"),
  quote(lines, depth) {
    const made = el("blockquote");
    markdown(made, lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n"), depth);
    return made;
  },
  list,
  table,
  formula(lines) {
    const text = lines.join("\n").trim();
    const closing = text.lastIndexOf(FORMULA[text.slice(0, 2)]);
    const made = el("p", "formula", formula(text.slice(2, closing).trim(), true));
    inline(made, text.slice(closing + 2));
    return made;
  },
};

const DEEPEST = 12; // lists and quotes in each other

const made = ({ kind, lines }, depth) => MAKERS[kind](lines, depth);

function markdown(parent, text, depth) {
  if (depth > DEEPEST) parent.append(text);
  else parent.append(...blocks(text).map((block) => made(block, depth + 1)));
}

const shown = new WeakMap(); // of an element: the sources of the blocks in it

// Show a text in an element that shows nothing else; blocks that it has already stay.
export function render(parent, text) {
  const before = shown.get(parent) ?? [];
  const now = blocks(text);
  const keys = now.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
  let same = 0;
  while (same < keys.length && keys[same] === before[same]) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  parent.append(...now.slice(same).map((block) => made(block, 1)));
  shown.set(parent, keys);
}

const indentOf = (line) => /^\s*/.exec(line)[0].length;

// What is indented deeper than an item belongs to it; a list ends where another kind begins.
function listEnd(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const depth = indent.length;
  const ordered = /\d/.test(mark);
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at];
    const item = ITEM.exec(line);
    if (!line.trim()) {
      const after = lines.slice(at + 1).find((next) => next.trim());
      if (after === undefined) return at;
      const next = ITEM.exec(after);
      if (indentOf(after) <= depth && !(next && next[1].length >= depth && /\d/.test(next[2]) === ordered)) return at;
    } else if (item ? item[1].length < depth || (item[1].length === depth && /\d/.test(item[2]) !== ordered) : indentOf(line) <= depth && (HEADING.test(line) || FENCE.test(line))) {
      return at;
    }
  }
  return at;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const column = indent.length;
  const ordered = /\d/.test(mark);
  const whole = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) whole.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= column) items.push([found[3]]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${column + 2 + (ordered ? 1 : 0)}}`), ""));
  }
  for (const [first, ...rest] of items) {
    const item = el("li");
    const task = TASK.exec(first);
    if (task) {
      const box = el("input");
      box.type = "checkbox";
      box.disabled = true;
      box.checked = task[1] !== " ";
      box.setAttribute("aria-label", box.checked ? "done" : "to do");
      item.className = "task";
      item.append(box, " ");
    }
    if (FENCE.test(first)) markdown(item, [first, ...rest].join("\n"), depth);
    else {
      const loose = rest.findIndex((line) => !line.trim() || special(line) || ROW.test(line));
      const own = loose < 0 ? rest : rest.slice(0, loose);
      inline(item, [first.slice(task?.[0].length ?? 0), ...own.map((line) => line.trim())].join("\n"));
      if (loose >= 0) markdown(item, rest.slice(loose).join("\n"), depth);
    }
    whole.append(item);
  }
  return whole;
}

function table(lines) {
  const cells = (line) => ROW.exec(line)[1].split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = lines[1].trim().replace(/^\||\|$/g, "").split("|").map((cell) => (/^\s*:-+:\s*$/.test(cell) ? "center" : /-:\s*$/.test(cell) ? "right" : ""));
  const row = (kind, texts) =>
    el(
      "tr",
      "",
      ...texts.map((text, n) => {
        const cell = el(kind, sides[n] ?? "");
        inline(cell, text);
        return cell;
      }),
    );
  const made = el("table", "", el("thead", "", row("th", cells(lines[0]))), el("tbody", "", ...lines.slice(2).map((line) => row("td", cells(line)))));
  const scrolled = el("div", "table", made);
  scrolled.tabIndex = 0;
  return scrolled;
}

const MOST_GROWING = 4000; // characters of a block of code that is coloured while it grows

function codeBlock(lines, closed) {
  const language = FENCE.exec(lines[0])[2];
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = el("button", "", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => copied(copy, text));
  const colours = closed || text.length < MOST_GROWING ? language.toLowerCase() : "";
  const scrolled = el("pre", "", code(text, colours));
  scrolled.tabIndex = 0;
  return el("div", "block", el("header", "", el("span", "", language || "text"), copy), scrolled);
}
