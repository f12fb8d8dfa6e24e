// The experts that an answer used: a row for each layer, a column for each expert, the darker the more often.

import { el } from "./dom.js";

const WIDEST = 256; // pixels of the drawing; more experts than that share them

// Counts of an answer that went on: of what was there and what came.
export const added = (before, counts) => (before ? counts.map((row, layer) => row.map((count, expert) => count + (before[layer]?.[expert] ?? 0))) : counts);

// counts: by layer and expert, as the server sends them.
export function strip(counts) {
  const experts = counts[0].length;
  const width = Math.min(experts, WIDEST);
  const rows = counts.map((row) => {
    const sums = new Array(width).fill(0);
    row.forEach((count, expert) => (sums[Math.floor((expert * width) / experts)] += count));
    return sums;
  });
  const most = rows.flat().reduce((a, b) => Math.max(a, b), 1);
  const used = counts.flat().filter(Boolean).length / counts.flat().length;
  const name = el("span", "heat-name", "experts");
  name.setAttribute("aria-hidden", "true"); // the picture says it
  const canvas = el("canvas", "heat");
  [canvas.width, canvas.height] = [rows[0].length, rows.length];
  const about = `Experts of this answer: ${rows.length} layers of ${experts}, ${(100 * used).toFixed(0)} % were used`;
  canvas.title = `${about}. A row for each layer, the darker the more often.`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", about);
  const brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  rows.forEach((row, y) => {
    row.forEach((count, x) => {
      brush.globalAlpha = count / most;
      brush.fillRect(x, y, 1, 1);
    });
  });
  return el("span", "experts", name, canvas);
}
