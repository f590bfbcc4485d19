// What is learnt from tabs that were killed while a source loaded or answered: how many steps to go down, what a step takes
// away, for how long that is remembered, and what is told of it. Plain values; where they are kept is marks.ts.

import type { Notice } from "./types.js";

/** What a load takes that a smaller device may not have. */
export interface Config {
  threads: number;
  contextLength: number;
}

/** A tab that was killed: in what, when (ms since 1970), and how it ran. */
export interface Kill extends Config {
  phase: string;
  at: number;
  /** Whether it was in the background, where phones end whatever takes memory: no reason to go lower. */
  hidden: boolean;
}

/** What kills taught about a source. Forgotten a week after the last one, or when what was killed answers after all. */
export interface History extends Config {
  /** Steps to go down, at most {@link MAX_STEPS}. */
  steps: number;
  /** Kills since the last answer. */
  inARow: number;
  /** The last kill. Threads and context are the most that any killed tab had. */
  phase: string;
  at: number;
}

/** What a load finds of those before it. */
export interface Past {
  history: History | null;
  /** The latest kill that was not told yet. */
  killed: Kill | null;
}

/** Nothing happened, or nobody knows. */
export const NO_PAST: Past = { history: null, killed: null };

/** Context where the caller names none; the engine's own default. */
export const DEFAULT_CONTEXT = 4096;

/** Context below which no step goes. */
export const MIN_CONTEXT = 1024;

/** Steps from the default to the smallest: one thread, half of the context, a quarter. */
export const MAX_STEPS = 3;

/** How long steps are kept after the kill that made them, in ms. */
export const MEMORY_MS = 7 * 24 * 3600 * 1000;

/** The history after one more kill. */
export function withKill(before: History | null, { phase, at, threads, contextLength }: Kill): History {
  return {
    steps: Math.min(MAX_STEPS, (before?.steps ?? 0) + 1),
    inARow: (before?.inARow ?? 0) + 1,
    threads: Math.max(threads, before?.threads ?? 0),
    contextLength: Math.max(contextLength, before?.contextLength ?? 0),
    phase,
    at,
  };
}

/** The history after an answer: none where no less than what was killed gave it, else the steps stay. */
export function withAnswer(before: History, config: Config): History | null {
  const whole = config.threads >= before.threads && config.contextLength >= before.contextLength;
  return whole ? null : { ...before, inARow: 0 };
}

/** The configuration so many steps lower. Threads go first, then half of the context at a time; what is fixed stays. */
export function stepDown(full: Config, steps: number, fixed: Record<keyof Config, boolean>): Config {
  let { threads, contextLength } = full;
  for (let step = 0; step < steps; step++) {
    if (!fixed.threads && threads > 1) threads = 1;
    else if (!fixed.contextLength && contextLength > MIN_CONTEXT)
      contextLength = Math.max(MIN_CONTEXT, Math.floor(contextLength / 2));
  }
  return { threads, contextLength };
}

/** What there is to tell when a source is loaded with `config`, where `full` is what it would have had without its past. */
export function noticesOf(
  { history, killed }: Past,
  { source, full, config }: { source: string; full: Config; config: Config },
): Notice[] {
  const notices: Notice[] = [];
  if (killed !== null) {
    const page = killed.hidden ? "this page in the background" : "this page";
    const message = `The browser ended ${page} ${whileIn(killed.phase)}, perhaps for lack of memory.`;
    const detail = { ...killed, source, inARow: history?.inARow ?? 0 };
    notices.push({ code: "tab_was_killed", message, detail });
  }
  const lowered: string[] = [];
  if (config.threads < full.threads) lowered.push("one thread");
  if (config.contextLength < full.contextLength) lowered.push(`a context of ${config.contextLength} tokens`);
  if (history !== null && lowered.length > 0) {
    const message = `The model runs with ${lowered.join(" and ")}, because the browser ended this page before.`;
    const { steps, inARow } = history;
    const detail = { ...config, cause: "tab_was_killed", source, from: full, steps, inARow };
    notices.push({ code: "stepped_down", message, detail });
  }
  return notices;
}

function whileIn(phase: string): string {
  if (phase === "start") return "while the engine started";
  return phase === "generation" ? "while the model answered" : "while the model was loaded";
}
