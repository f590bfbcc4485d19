// The card that chooses a model, and the bar that tells how far its load is.

import type { ModelSource, Progress } from "qandle";
import { byId, make } from "./dom.js";
import { explain } from "./explain.js";
import { bytes, seconds } from "./format.js";
import { checkAddress, locate, OFFERS, offerOf } from "./models.js";

const PHASES: Record<Progress["phase"], string> = {
  plan: "Reading the model's header",
  download: "Downloading",
  verify: "Checking",
  load: "Preparing the weights",
  warmup: "Warming up",
};

/** What the user chose. */
export interface Choice {
  /** Finds out what to load. Rejects with a `Refusal` where that cannot be loaded, with an `AbortError` under the signal. */
  find(signal: AbortSignal): Promise<ModelSource>;
  /** What to remember once it is loaded; null for a file, which cannot be. */
  keep: string | null;
}

/** Shows the chooser; `onLoad` is called with each choice. Hands back what reads the choice as it stands. */
export function bindStart(kept: string | undefined, onLoad: (choice: Choice) => void): () => Choice | null {
  const list = byId("models", HTMLFieldSetElement);
  const chosen = offerOf(kept);
  for (const offer of OFFERS) {
    const label = make("label", { className: "offer" });
    const radio = make("input");
    radio.type = "radio";
    radio.name = "model";
    radio.value = offer.id;
    radio.checked = offer.id === chosen;
    const text = make("span", { className: "offer-text" });
    text.append(
      make("strong", { text: offer.name }),
      make("span", { className: "detail", text: offer.about }),
    );
    label.append(radio, text);
    if (offer.bytes !== null) label.append(make("span", { className: "size", text: bytes(offer.bytes) }));
    list.append(label);
  }
  const url = byId("custom-url", HTMLInputElement);
  const file = byId("model-file", HTMLInputElement);
  if (chosen === "custom") url.value = kept ?? "";
  const update = () => {
    byId("custom-row", HTMLElement).hidden = selected() !== "custom";
    byId("file-row", HTMLElement).hidden = selected() !== "file";
    url.required = selected() === "custom";
    file.required = selected() === "file";
  };
  list.addEventListener("change", update);
  update();
  const read = () => readChoice(url, file);
  byId("load-form", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    const choice = read();
    if (choice !== null) onLoad(choice);
  });
  // Before somebody listens a click would be lost.
  byId("load", HTMLButtonElement).disabled = false;
  return read;
}

function selected(): string {
  return document.querySelector<HTMLInputElement>("input[name=model]:checked")?.value ?? "";
}

function readChoice(url: HTMLInputElement, file: HTMLInputElement): Choice | null {
  const id = selected();
  if (id === "file") {
    const [first] = file.files ?? [];
    return first === undefined ? null : { find: async () => first, keep: null };
  }
  if (id === "custom") {
    const address = url.value.trim();
    return address === "" ? null : { find: async () => checkAddress(address), keep: address };
  }
  const offer = OFFERS.find((offer) => offer.id === id);
  if (offer === undefined) return null;
  return { find: (signal) => locate(offer, signal), keep: offer.hub ?? offer.local?.path ?? null };
}

/** Shows the bar in place of the chooser. */
export function showLoading(): void {
  byId("start-title", HTMLElement).textContent = "Loading the model";
  byId("load-form", HTMLFormElement).hidden = true;
  byId("load-error", HTMLElement).hidden = true;
  byId("loading", HTMLElement).hidden = false;
  byId("progress", HTMLProgressElement).value = 0;
  byId("progress-label", HTMLElement).textContent = "Starting the engine";
  byId("progress-detail", HTMLElement).textContent = "";
  byId("cancel-load", HTMLButtonElement).focus();
}

/** Shows the chooser, with what went wrong if something did. */
export function showChooser(error?: unknown): void {
  byId("start-title", HTMLElement).textContent = "Choose a model";
  byId("load-form", HTMLFormElement).hidden = false;
  byId("loading", HTMLElement).hidden = true;
  const box = byId("load-error", HTMLElement);
  box.hidden = error === undefined;
  if (error !== undefined) fillError(box, error);
  byId("load", HTMLButtonElement).focus();
}

/** Writes a failure and what to do into a box. */
export function fillError(box: HTMLElement, error: unknown): void {
  const { what, advice } = explain(error);
  box.replaceChildren(make("strong", { text: what }), make("p", { text: advice }));
}

export function showProgress({
  phase,
  loaded,
  total,
  fraction,
  source,
  bytesPerSecond,
  etaSeconds,
}: Progress): void {
  byId("progress", HTMLProgressElement).value = fraction;
  const where = phase === "download" && source !== "network" ? "Reading" : PHASES[phase];
  byId("progress-label", HTMLElement).textContent = `${where} · ${Math.floor(fraction * 100)} %`;
  const parts: string[] = [];
  if (loaded > 0) parts.push(total === null ? bytes(loaded) : `${bytes(loaded)} of ${bytes(total)}`);
  if (bytesPerSecond !== null && bytesPerSecond > 0) parts.push(`${bytes(bytesPerSecond)}/s`);
  if (etaSeconds !== null) parts.push(`${seconds(etaSeconds)} left`);
  byId("progress-detail", HTMLElement).textContent = parts.join(" · ");
}
