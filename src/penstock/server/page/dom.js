// Small helpers for elements, shared by all parts of the page.

export const $ = (id) => document.getElementById(id);

export const el = (name, classes = "", ...children) => {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
};

export function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

export const ICONS = {
  copy: "M9 9h10v11H9zM15 9V5H5v10h4",
  again: "M19 12a7 7 0 1 1-2.1-5M19 4v4h-4",
  pen: "M5 19l1-4L16 5l3 3L9 18l-4 1z",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  back: "M14 6l-6 6 6 6",
  forth: "M10 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  tick: "M5 12.5l4.5 4.5L19 7.5",
};

// A button with a picture alone; its name is for pointers and screen readers.
export function action(title, path, act) {
  const button = el("button", "", icon(path));
  button.type = "button";
  button.title = title;
  button.setAttribute("aria-label", title);
  button.addEventListener("click", () => act(button));
  return button;
}

export async function copied(button, text) {
  const before = [...button.childNodes];
  try {
    await navigator.clipboard.writeText(text);
    button.replaceChildren(before[0].nodeType === Node.TEXT_NODE ? "Copied" : icon(ICONS.tick));
  } catch {
    button.replaceChildren("Not allowed here");
  }
  setTimeout(() => button.replaceChildren(...before), 1200);
}

// What screen readers hear, and nobody sees.
export function announce(text) {
  $("spoken").textContent = text;
}

// A line at the foot of the page for a while, with something to do about what it says.
let fading = null;
export function toast(text, label, act, seconds = 12) {
  clearTimeout(fading);
  const shown = $("toast");
  const button = el("button", "", label);
  button.type = "button";
  const end = () => {
    clearTimeout(fading);
    shown.hidden = true;
  };
  button.addEventListener("click", () => {
    end();
    act();
  });
  shown.replaceChildren(el("span", "", text), button);
  shown.hidden = false;
  fading = setTimeout(end, 1000 * seconds);
}

export const size = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(0)} MB` : `${(n / 1e9).toFixed(1)} GB`);

// Crypto's own makes no ids on pages that came over plain HTTP from another machine.
export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
