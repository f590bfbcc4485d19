// `qandle/page`: what a chat page keeps between visits, by a small wasm module of its own over local storage. For the
// window's side; the engine does not need it.

import { failure } from "./errors.js";

/** What is kept. Absent keys have the page's own defaults. */
export interface Preferences {
  /** Source of the chosen model. */
  model?: string;
  tier?: string;
  threads?: string | number;
  theme?: string;
  language?: string;
  contextLength?: number;
  temperature?: number;
  systemPrompt?: string;
}

/** The page's store. Where local storage is refused, values last as long as the page. */
export interface PageStore {
  preferences(): Preferences;
  /** Keeps one value; null or undefined forgets it. */
  setPreference<K extends keyof Preferences>(key: K, value: Preferences[K] | null): void;
  resetPreferences(): void;
  /** Marks that a risky phase begins; the mark is found by the next visit if the tab is killed in it. */
  markPhase(phase: string): void;
  clearPhase(): void;
  /** The phase in which the tab was killed, or null. */
  lastPhase(): string | null;
}

/** Fetches and starts the page module. */
export async function openPageStore(): Promise<PageStore> {
  const wasm = new URL("./wasm/qandle_page.wasm", import.meta.url);
  const glue = await import("./wasm/qandle_page.js");
  try {
    await glue.default({ module_or_path: wasm });
  } catch (cause) {
    throw failure("network", `the page module could not be started from ${wasm.href}`, { cause });
  }
  return {
    preferences: () => readPreferences(glue.preferences()),
    setPreference: (key, value) => glue.set_preference(key, value),
    resetPreferences: () => glue.reset_preferences(),
    markPhase: (phase) => glue.mark_phase(phase),
    clearPhase: () => glue.clear_phase(),
    lastPhase: () => glue.last_phase() ?? null,
  };
}

/** Only what has the promised type is let through: the store may hold values of another version. */
function readPreferences(stored: unknown): Preferences {
  if (typeof stored !== "object" || stored === null) return {};
  const entries = stored instanceof Map ? Object.fromEntries(stored) : { ...stored };
  const text = (key: string) => (typeof entries[key] === "string" ? (entries[key] as string) : undefined);
  const number = (key: string) => (typeof entries[key] === "number" ? (entries[key] as number) : undefined);
  return {
    model: text("model"),
    tier: text("tier"),
    threads: text("threads") ?? number("threads"),
    theme: text("theme"),
    language: text("language"),
    contextLength: number("contextLength"),
    temperature: number("temperature"),
    systemPrompt: text("systemPrompt"),
  };
}
