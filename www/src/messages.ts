// The conversation on screen. Everything a model or a user wrote is set as text; streamed text is appended to one text
// node, so that a long answer costs no more per token than a short one.

import { byId, make } from "./dom.js";
import { fillError } from "./start.js";

/** Pixels from the end within which the view follows new text. */
const FOLLOW_WITHIN = 80;

/** An answer that is being written. */
export interface Answer {
  append(text: string): void;
  appendThought(text: string): void;
  /** The answer has ended; `note` stands below it. */
  end(note: string): void;
  remove(): void;
}

export function addUser(text: string): { remove(): void } {
  const box = add("user", "You");
  box.append(make("div", { className: "text", text }));
  scrollToEnd();
  return box;
}

export function addAnswer(): Answer {
  const box = add("assistant", "Answer");
  box.setAttribute("aria-busy", "true");
  const thoughts = make("details", { className: "thoughts" });
  const summary = make("summary", { text: "Thinking…" });
  const thoughtText = document.createTextNode("");
  const thoughtBox = make("div", { className: "text" });
  thoughtBox.append(thoughtText);
  thoughts.append(summary, thoughtBox);
  const text = document.createTextNode("");
  const textBox = make("div", { className: "text waiting" });
  textBox.append(text);
  box.append(textBox);
  const append = (node: Text, more: string) => {
    if (more === "") return;
    following(() => node.appendData(more));
  };
  return {
    append: (more) => {
      if (more !== "") {
        textBox.classList.remove("waiting");
        summary.textContent = "Thoughts";
      }
      append(text, more);
    },
    appendThought: (more) => {
      if (!thoughts.isConnected) box.insertBefore(thoughts, textBox);
      append(thoughtText, more);
    },
    end: (note) => {
      box.removeAttribute("aria-busy");
      textBox.classList.remove("waiting");
      if (thoughts.isConnected) summary.textContent = "Thoughts";
      following(() => box.append(make("p", { className: "detail", text: note })));
    },
    remove: () => box.remove(),
  };
}

export function addError(error: unknown): void {
  const box = add("error", "Error");
  box.setAttribute("role", "alert");
  const text = make("div");
  fillError(text, error);
  box.append(text);
  scrollToEnd();
}

export function clearMessages(): void {
  byId("messages", HTMLElement).replaceChildren();
}

function add(kind: "user" | "assistant" | "error", author: string): HTMLElement {
  const box = make("article", {
    className: kind === "error" ? "message error error-box" : `message ${kind}`,
  });
  box.setAttribute("aria-label", author);
  byId("messages", HTMLElement).append(box);
  return box;
}

/** Changes the view and stays at its end if it was there: who scrolled up to read is left in peace. */
function following(change: () => void): void {
  const view = byId("messages", HTMLElement);
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < FOLLOW_WITHIN;
  change();
  if (atEnd) view.scrollTop = view.scrollHeight;
}

function scrollToEnd(): void {
  const view = byId("messages", HTMLElement);
  view.scrollTop = view.scrollHeight;
}
