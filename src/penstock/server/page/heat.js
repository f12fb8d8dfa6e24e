// The experts that an answer used: a row for each layer, a column for each expert, the darker the more often.

import { el } from "./dom.js";

const WIDEST = 256; // pixels of the drawing; more experts than that share them

// Counts by layer and expert as the server sends them, made small enough to be kept with an answer: parts of the largest
// count, from 0 to 9, a string for each layer.
export function packed(counts) {
  const experts = Math.max(...counts.map((row) => row.length));
  const width = Math.min(experts, WIDEST);
  const rows = counts.map((row) => {
    const sums = new Array(width).fill(0);
    row.forEach((count, expert) => (sums[Math.floor((expert * width) / experts)] += count));
    return sums;
  });
  const most = Math.max(1, ...rows.flat());
  const used = counts.flat().filter(Boolean).length / counts.flat().length;
  return { experts, used, rows: rows.map((row) => row.map((count) => Math.ceil((9 * count) / most)).join("")) };
}

export function strip({ experts, used, rows }) {
  const canvas = el("canvas", "heat");
  [canvas.width, canvas.height] = [rows[0].length, rows.length];
  const about = `Experts of this answer: ${rows.length} layers of ${experts}, ${(100 * used).toFixed(0)} % were used`;
  canvas.title = `${about}. A row for each layer, the darker the more often.`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", about);
  const brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  rows.forEach((row, y) => {
    [...row].forEach((level, x) => {
      brush.globalAlpha = Math.sqrt(Number(level) / 9);
      brush.fillRect(x, y, 1, 1);
    });
  });
  return canvas;
}
