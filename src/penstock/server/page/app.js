// The chat page: conversations with the server it came from. Plain JavaScript modules; what the model writes only ever
// becomes text nodes, never markup.

import { allow, editLast, grow, leaveEditing, running, send, stop } from "./chat.js";
import { $ } from "./dom.js";
import { fresh, start } from "./sidebar.js";
import { connect, state } from "./status.js";

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running()) stop();
  else send();
});
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("input").value && !running() && editLast()) event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const dialog = document.querySelector("dialog[open]");
  const writing = event.target.matches("input, textarea, select") || dialog;
  if (event.key === "Escape" && !dialog) {
    if (running()) stop();
    else leaveEditing();
  }
  if (event.key === "/" && !writing) {
    event.preventDefault();
    $("input").focus();
  }
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey) && !dialog) {
    event.preventDefault();
    fresh();
  }
});
for (const idea of $("ideas").children) {
  idea.addEventListener("click", () => {
    $("input").value = idea.textContent;
    send();
  });
}

state.changed = allow;
grow();
start().finally(connect);
