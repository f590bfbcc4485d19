// The settings dialog: shows the choices, keeps each change at once.

import type { PageStore } from "qandle/page";
import { byId } from "./dom.js";
import { type Choices, readChoices } from "./preferences.js";

const MAX_LISTED_THREADS = 16;

/** Binds the dialog to `choices`, which it changes in place. */
export function bindSettings(choices: Choices, store: PageStore): void {
  const dialog = byId("settings", HTMLDialogElement);
  const temperature = byId("temperature", HTMLInputElement);
  const shown = byId("temperature-value", HTMLOutputElement);
  const systemPrompt = byId("system-prompt", HTMLTextAreaElement);
  const context = byId("context", HTMLSelectElement);
  const tier = byId("tier", HTMLSelectElement);
  const threads = byId("threads", HTMLSelectElement);
  const theme = byId("theme", HTMLSelectElement);

  for (let n = 1; n <= Math.min(navigator.hardwareConcurrency ?? 1, MAX_LISTED_THREADS); n++) {
    threads.add(new Option(String(n), String(n)));
  }

  const show = () => {
    temperature.value = String(choices.temperature);
    shown.textContent = temperature.value;
    systemPrompt.value = choices.systemPrompt;
    select(context, String(choices.contextLength));
    tier.value = choices.tier;
    select(threads, String(choices.threads));
    theme.value = choices.theme;
    if (choices.theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choices.theme;
  };

  temperature.addEventListener("input", () => {
    choices.temperature = temperature.valueAsNumber;
    shown.textContent = temperature.value;
    store.setPreference("temperature", choices.temperature);
  });
  systemPrompt.addEventListener("change", () => {
    choices.systemPrompt = systemPrompt.value.trim();
    store.setPreference("systemPrompt", choices.systemPrompt);
  });
  context.addEventListener("change", () => {
    choices.contextLength = Number(context.value);
    store.setPreference("contextLength", choices.contextLength);
  });
  tier.addEventListener("change", () => {
    choices.tier = tier.value === "simd128" || tier.value === "relaxed" ? tier.value : "auto";
    store.setPreference("tier", choices.tier);
  });
  threads.addEventListener("change", () => {
    choices.threads = threads.value === "auto" ? "auto" : Number(threads.value);
    store.setPreference("threads", choices.threads);
  });
  theme.addEventListener("change", () => {
    choices.theme = theme.value === "light" || theme.value === "dark" ? theme.value : "auto";
    store.setPreference("theme", choices.theme);
    show();
  });
  byId("reset-settings", HTMLButtonElement).addEventListener("click", () => {
    store.resetPreferences();
    Object.assign(choices, readChoices(store.preferences(), new URLSearchParams()), { model: choices.model });
    show();
  });
  byId("open-settings", HTMLButtonElement).addEventListener("click", () => dialog.showModal());
  show();
}

/** Selects a value, adding it where the list does not have it. */
function select(list: HTMLSelectElement, value: string): void {
  if (![...list.options].some((option) => option.value === value)) list.add(new Option(value, value));
  list.value = value;
}
