// The page: idle → loading → ready ⇄ answering. `data-state` on the root says which; owns the engine and the abort
// controllers of what runs. Views are in start.ts, messages.ts and settings.ts.

import { type Engine, load, type Notice } from "qandle";
import { tabKills } from "qandle/page";
import { Conversation, type TurnEnd } from "./conversation.js";
import { byId, make } from "./dom.js";
import { isAbort, isDeath } from "./explain.js";
import { bytes, rate } from "./format.js";
import { addAnswer, addError, addUser, clearMessages } from "./messages.js";
import { keepBuilds, keepPage } from "./offline.js";
import { DEFAULT_CONTEXT, openStore, readChoices } from "./preferences.js";
import { bindSettings } from "./settings.js";
import { bindStart, type Choice, showChooser, showLoading, showProgress } from "./start.js";

/** Kills of this tab in a row after which a model is loaded only when somebody asks for it. */
const MAX_KILLS = 3;

type State = "idle" | "loading" | "ready" | "answering" | "error";

const query = new URLSearchParams(location.search);
const store = await openStore();
const choices = readChoices(store.preferences(), query);
const prompt = byId("prompt", HTMLTextAreaElement);

let engine: Engine | null = null;
let conversation: Conversation | null = null;
// What may be stopped. A task whose controller is no longer here was left: it must not touch the page any more.
let running: AbortController | null = null;

bindSettings(choices, store);
const readChoice = bindStart(choices.model, start);
bindPage();
setState("idle");
void keepPage(showUpdate);
if (query.has("autoload")) loadByItself();

function loadByItself(): void {
  const choice = readChoice();
  if (choice !== null) void start(choice, { isAsked: false });
}

/** Loads a model; the page is idle again when that is cancelled, or when it has to be asked for first. */
async function start({ find, keep }: Choice, { isAsked = true } = {}): Promise<void> {
  if (running !== null) return;
  running = new AbortController();
  setState("loading");
  setStatus("Loading the model.");
  byId("notices", HTMLElement).replaceChildren();
  showLoading();
  const { contextLength, tier, threads } = choices;
  try {
    const source = await find(running.signal);
    if (!isAsked && (await tabKills(source)).inARow >= MAX_KILLS) return askFirst();
    engine = await load(source, {
      signal: running.signal,
      contextLength: contextLength === DEFAULT_CONTEXT ? undefined : contextLength,
      tier,
      threads,
      // The page does not open an earlier chat again, so nothing of one is to stay on the disk.
      limits: { diskBytes: 0 },
      onProgress: showProgress,
      onNotice: showNotice,
    });
    // A source that failed is not offered again after a reload.
    if (keep !== null) store.setPreference("model", keep);
    if (tier !== "auto") void keepBuilds(tier);
    showEngine(engine);
    newChat();
  } catch (error) {
    if (isAbort(error)) {
      showChooser();
      setState("idle");
      setStatus("Loading was cancelled.");
    } else {
      showChooser(error);
      setState("error");
      setStatus("The model could not be loaded.");
    }
  } finally {
    running = null;
  }
}

/** What would end the tab again and again is not begun without a person. */
function askFirst(): void {
  showChooser();
  setState("idle");
  setStatus("Press Load to try this model again.");
  showNotice({
    message: `The browser ended this page ${MAX_KILLS} times in a row while this model loaded or answered, so it is not loaded by itself. Press Load to try it with the least memory, or choose a smaller model.`,
  });
}

/** Sends what is in the prompt and streams the answer. */
async function ask(): Promise<void> {
  const question = prompt.value.trim();
  if (conversation === null || running !== null || question === "") return;
  const mine = new AbortController();
  running = mine;
  setPrompt("");
  setState("answering");
  setStatus("Answering…");
  const asked = addUser(question);
  const answer = addAnswer();
  let wrote = false;
  const written = (append: (text: string) => void) => (text: string) => {
    wrote = true;
    append(text);
  };
  try {
    const end = await conversation.ask(question, {
      choices,
      signal: mine.signal,
      events: {
        onText: written(answer.append),
        onThought: written(answer.appendThought),
        onSpeed: showSpeed,
      },
    });
    if (running !== mine) return;
    answer.end(describe(end));
    showMemory();
    setState("ready");
    setStatus(end.finish === "abort" ? "Stopped." : "The answer is complete.");
  } catch (error) {
    if (running !== mine) return;
    if (wrote) answer.end("The answer broke off.");
    else answer.remove();
    // The question goes back to the prompt, and stands there alone: unless part of its answer is to be read, the next
    // question is being typed already, or the prompt is out of sight.
    if (prompt.value === "") {
      setPrompt(question);
      if (!wrote && !isDeath(error)) asked.remove();
    }
    if (isAbort(error)) {
      setState("ready");
      setStatus("Stopped.");
    } else {
      setStatus("The answer failed.");
      if (isDeath(error)) leave(error);
      else {
        addError(error);
        setState("ready");
      }
    }
  } finally {
    if (running === mine) {
      running = null;
      prompt.focus();
    }
  }
}

/** Stops what runs and goes on without waiting for its end. */
function abandon(): void {
  running?.abort();
  running = null;
}

/** Back to the chooser: by choice, or because the engine died. The conversation stays on screen until the next load. */
function leave(error?: unknown): void {
  abandon();
  void engine?.close();
  engine = null;
  conversation = null;
  byId("start", HTMLElement).hidden = false;
  byId("chat", HTMLElement).hidden = error === undefined;
  for (const id of ["composer", "facts", "new-chat", "change-model"]) byId(id, HTMLElement).hidden = true;
  showName("No model loaded");
  showChooser(error);
  setState(error === undefined ? "idle" : "error");
}

function newChat(): void {
  if (engine === null) return;
  abandon();
  conversation = new Conversation(engine);
  clearMessages();
  setState("ready");
  setStatus("Ready.");
  prompt.focus();
}

function bindPage(): void {
  byId("composer", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    void ask();
  });
  prompt.addEventListener("keydown", (event) => {
    // An Enter that ends the composition of a character is not for us.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void ask();
  });
  prompt.addEventListener("input", fitPrompt);
  addEventListener("resize", fitPrompt);
  byId("stop", HTMLButtonElement).addEventListener("click", () => running?.abort());
  byId("cancel-load", HTMLButtonElement).addEventListener("click", () => running?.abort());
  byId("new-chat", HTMLButtonElement).addEventListener("click", newChat);
  byId("change-model", HTMLButtonElement).addEventListener("click", () => {
    leave();
    setStatus("Choose a model and load it.");
  });
}

function setState(state: State): void {
  document.documentElement.dataset.state = state;
  byId("send", HTMLButtonElement).hidden = state === "answering";
  byId("stop", HTMLButtonElement).hidden = state !== "answering";
}

function setStatus(text: string): void {
  byId("status", HTMLElement).textContent = text;
}

function setPrompt(text: string): void {
  prompt.value = text;
  fitPrompt();
}

/** As high as the wrapped text, up to the style sheet's maximum. */
function fitPrompt(): void {
  prompt.style.height = "auto";
  const borders = prompt.offsetHeight - prompt.clientHeight;
  prompt.style.height = `${prompt.scrollHeight + borders}px`;
}

function showEngine({ info }: Engine): void {
  byId("start", HTMLElement).hidden = true;
  for (const id of ["chat", "composer", "facts", "new-chat", "change-model"])
    byId(id, HTMLElement).hidden = false;
  showName(`${info.model.name} · ${info.model.quantization}`);
  byId("fact-tier", HTMLElement).textContent = info.runtime.tier === "relaxed" ? "Relaxed SIMD" : "SIMD";
  const { threads } = info.runtime;
  byId("fact-threads", HTMLElement).textContent = threads === 1 ? "1 thread" : `${threads} threads`;
  byId("fact-speed", HTMLElement).textContent = "– tok/s";
  showMemory();
  // What was typed before this load could not be measured while the prompt was hidden.
  fitPrompt();
}

/** The whole name is the tooltip too, as the header cuts a long one. */
function showName(text: string): void {
  const name = byId("model-name", HTMLElement);
  name.textContent = text;
  name.title = text;
}

function showMemory(): void {
  if (engine === null) return;
  byId("fact-memory", HTMLElement).textContent = `${bytes(engine.info.memory.wasmBytes)} memory`;
}

function showSpeed(tokensPerSecond: number): void {
  byId("fact-speed", HTMLElement).textContent = rate(tokensPerSecond);
}

function showNotice({ message }: Pick<Notice, "message">): void {
  byId("notices", HTMLElement).append(make("li", { text: message }));
}

/** One quiet line: the page goes on as it is until somebody presses the button. */
function showUpdate(reload: () => void): void {
  byId("update", HTMLElement).hidden = false;
  byId("reload", HTMLButtonElement).onclick = reload;
}

/** What stands below an answer: why it ended if not by itself, and how fast it was. */
function describe({ finish, extra }: TurnEnd): string {
  const parts: string[] = [];
  if (finish === "abort") parts.push("Stopped");
  if (finish === "length") parts.push("Cut off at the length limit");
  if (extra !== undefined) {
    const { decode_tokens_per_second: speed, ttft_ms: ttft } = extra.timings;
    showSpeed(speed);
    parts.push(rate(speed), `first word after ${(ttft / 1000).toFixed(1)} s`);
    if (extra.dropped_messages > 0) parts.push(`${extra.dropped_messages} oldest messages no longer fit`);
  }
  return parts.join(" · ");
}
