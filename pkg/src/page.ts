// `qandle/page`: what a page keeps between visits, by a small wasm module of its own over local storage. For the window's
// side. A chat page keeps its preferences here; `load` its marks, and goes without them where the module cannot start.

import { assetsFolder } from "./assets.js";
import { failure } from "./errors.js";
import { countKills, type MarkHost, type MarkStore } from "./marks.js";
import { nameOf, resolveSource } from "./source.js";
import type { ModelSource } from "./types.js";

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
}

/** Tabs that were killed without a word over one source. */
export interface TabKills {
  /** How many, one after the other, since the source last answered. */
  inARow: number;
  /** In what the last one was killed, and when (ms since 1970). */
  last: { phase: string; at: number } | null;
}

type Module = typeof import("./wasm/qandle_page.js");

/** What every key of a mark begins with. */
const MARK_PREFIX = "qandle.mark.";

/** Fetches and starts the page module. */
export async function openPageStore(): Promise<PageStore> {
  const module = await startModule();
  return {
    preferences: () => readPreferences(module.preferences()),
    setPreference: (key, value) => module.set_preference(key, value),
    resetPreferences: () => module.reset_preferences(),
  };
}

/**
 * How often the browser ended a tab over this source, with what the next `load` of it will tell. After three times in a
 * row a page should not load it by itself any more, but ask. Never rejects but for a source that is none.
 */
export async function tabKills(source: ModelSource): Promise<TabKills> {
  const name = nameOf(resolveSource(source));
  const host = name === null ? undefined : markHost(name);
  return host === undefined ? { inARow: 0, last: null } : countKills(host);
}

/** Where the marks of a source are kept; nowhere in workers, on insecure pages, and where local storage is refused. */
export function markHost(source: string, assetsUrl?: string | URL): MarkHost | undefined {
  const storage = localStorageHere();
  const locks = globalThis.navigator?.locks;
  if (storage === undefined || locks === undefined) return undefined;
  return {
    source,
    // The one look past the module: it is asked before each load, and the module comes only later.
    isEmpty: () => !Object.keys(storage).some((key) => key.startsWith(MARK_PREFIX)),
    open: () => openMarks(assetsUrl),
    isHidden: () => document.visibilityState === "hidden",
    locks,
    events: globalThis,
  };
}

async function openMarks(assetsUrl: string | URL | undefined): Promise<MarkStore> {
  const module = await startModule(assetsUrl);
  return {
    setMark: (id, value) => void module.set_mark(id, value),
    marks: () => module.marks(),
    clearMark: (id) => module.clear_mark(id),
  };
}

function localStorageHere(): Storage | undefined {
  // Workers have no document; Node has a local storage of its own that warns when it is looked at.
  if (globalThis.document === undefined) return undefined;
  try {
    const { localStorage } = globalThis;
    return Number.isInteger(localStorage?.length) ? localStorage : undefined;
  } catch {
    return undefined; // Refused, as to sandboxed frames and where cookies are blocked; or its file is damaged.
  }
}

/** One module for all who ask; a start that failed may be tried again. */
const modules = new Map<string, Promise<Module>>();

function startModule(assetsUrl?: string | URL): Promise<Module> {
  const place = String(assetsUrl ?? "");
  let module = modules.get(place);
  if (module === undefined) {
    module = fetchModule(assetsUrl);
    modules.set(place, module);
    module.catch(() => modules.delete(place));
  }
  return module;
}

async function fetchModule(assetsUrl: string | URL | undefined): Promise<Module> {
  let wasm: URL;
  let module: Module;
  if (assetsUrl === undefined) {
    wasm = new URL("./wasm/qandle_page.wasm", import.meta.url);
    module = await import("./wasm/qandle_page.js");
  } else {
    const folder = assetsFolder(assetsUrl);
    wasm = new URL("wasm/qandle_page.wasm", folder);
    const glue = new URL("wasm/qandle_page.js", folder).href;
    module = (await import(/* @vite-ignore */ /* webpackIgnore: true */ glue)) as Module;
  }
  try {
    await module.default({ module_or_path: wasm });
  } catch (cause) {
    throw failure("network", `the page module could not be started from ${wasm.href}`, { cause });
  }
  return module;
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
