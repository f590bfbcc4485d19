// The user's choices: kept through the page module, overridden by the address (?model=…&threads=1&tier=simd128&context=2048).

import { openPageStore, type PageStore, type Preferences } from "qandle/page";

/** Choices with every default filled in. */
export interface Choices {
  model: string | undefined;
  tier: "auto" | "simd128" | "relaxed";
  threads: number | "auto";
  theme: "auto" | "light" | "dark";
  contextLength: number;
  temperature: number;
  systemPrompt: string;
}

// The page module's own, for where it cannot start.
const DEFAULT_TEMPERATURE = 0.6;
/** Tokens; chosen by nobody, so that `load` may take less where that much has ended the tab. */
export const DEFAULT_CONTEXT = 4096;

const nothingKept: PageStore = {
  preferences: () => ({}),
  setPreference: () => {},
  resetPreferences: () => {},
};

/** The store, or one that keeps nothing where the page module cannot start: the chat works without it. */
export async function openStore(): Promise<PageStore> {
  try {
    return await openPageStore();
  } catch (error) {
    console.warn("preferences are not kept:", error);
    return nothingKept;
  }
}

/** What was kept, checked, with the address's own wishes over it. */
export function readChoices(kept: Preferences, query: URLSearchParams): Choices {
  const tier = query.get("tier") ?? kept.tier;
  const theme = kept.theme;
  const threads = Number(query.get("threads") ?? kept.threads);
  const context = Number(query.get("context") ?? kept.contextLength);
  const { temperature = DEFAULT_TEMPERATURE } = kept;
  return {
    model: query.get("model") ?? kept.model,
    tier: tier === "simd128" || tier === "relaxed" ? tier : "auto",
    threads: Number.isInteger(threads) && threads >= 1 ? threads : "auto",
    theme: theme === "light" || theme === "dark" ? theme : "auto",
    contextLength: Number.isInteger(context) && context >= 1 ? context : DEFAULT_CONTEXT,
    temperature: temperature >= 0 && temperature <= 2 ? temperature : DEFAULT_TEMPERATURE,
    systemPrompt: kept.systemPrompt ?? "",
  };
}
