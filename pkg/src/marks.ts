// Tombstones: while something risky goes on, a mark stands in local storage; it is taken away however that ends. One that
// is left belongs to a tab that was killed without a word, as phones do for lack of memory. Owns the marks and who is
// dead; what follows from a death is in step_down.ts, the storage in page.ts.

import { randomName } from "./lock.js";
import {
  type Config,
  type History,
  type Kill,
  MEMORY_MS,
  NO_PAST,
  type Past,
  withAnswer,
  withKill,
} from "./step_down.js";

/** A stored value, and when it was stored (ms since 1970). */
export interface Mark {
  id: string;
  at: number;
  value: unknown;
}

/** The marks of all tabs of the origin. Nothing here throws; what cannot be stored is not. */
export interface MarkStore {
  setMark(id: string, value: object): void;
  marks(): Mark[];
  clearMark(id: string): void;
}

/** What marks need from a page; a test brings its own. */
export interface MarkHost {
  /** What is loaded, by a name that the next visit gives it too. */
  source: string;
  /** Whether there are no marks at all: asked first, so that no load waits for the store without need. */
  isEmpty(): boolean;
  open(): Promise<MarkStore>;
  /** A page holds a lock of its mark's name for as long as the mark stands. */
  locks: Pick<LockManager, "request">;
  /** The window: tells of `pagehide`, `pageshow` and `visibilitychange`. */
  events: Pick<EventTarget, "addEventListener" | "removeEventListener">;
  isHidden(): boolean;
}

/** How long a load waits for a store in which something lies, in ms. */
export const STORE_LIMIT_MS = 10_000;

const EVENTS = ["pagehide", "pageshow", "visibilitychange"];

/**
 * What earlier loads of the source left. A mark of a tab that is gone is taken away and counted: once, whichever tab
 * looks first, and as one kill where several tabs went down together.
 */
export async function lookBack(host: MarkHost, signal?: AbortSignal): Promise<Past> {
  const store = await openInTime(host, signal);
  if (store === null) return NO_PAST;
  const kills = await killsIn(store, host, { take: true });
  const before = readHistory(store, host.source);
  const killed = latest(kills);
  const counted = latest(kills.filter(({ hidden }) => !hidden));
  if (counted === null) return { history: before, killed };
  const history = withKill(before, counted);
  writeHistory(store, host.source, history);
  return { history, killed };
}

/** Kills in a row while the source loaded or answered, with those that no load has counted yet. Takes nothing away. */
export async function countKills(
  host: MarkHost,
): Promise<{ inARow: number; last: { phase: string; at: number } | null }> {
  const store = await openInTime(host);
  if (store === null) return { inARow: 0, last: null };
  const kills = await killsIn(store, host, { take: false });
  const before = readHistory(store, host.source);
  const fresh = kills.some(({ hidden }) => !hidden) ? 1 : 0;
  const last = latest(kills) ?? before;
  return {
    inARow: (before?.inARow ?? 0) + fresh,
    last: last === null ? null : { phase: last.phase, at: last.at },
  };
}

/** The mark of one load and of the engine that comes of it, which stands while anything risky goes on. */
export class Marker {
  readonly #host: MarkHost;
  readonly #config: Config;
  #history: History | null;
  #store: MarkStore | null = null;
  #running = 0;
  #mark: { id: string; phase: string; isHeld: boolean; release(): void } | null = null;
  /** Whether the page was left; it may come back as it was. */
  #isLeft = false;

  /** Opens the store, for which nobody waits. */
  constructor(host: MarkHost, { config, history }: { config: Config; history: History | null }) {
    this.#host = host;
    this.#config = config;
    this.#history = history;
    host.open().then(
      (store) => {
        this.#store = store;
        this.#write();
      },
      () => {}, // Without the store there are no marks; a load does not fail of that.
    );
  }

  /** Something risky begins. */
  enter(phase: string): void {
    this.#running++;
    if (this.#mark === null) this.#begin(phase);
    else this.tell(phase);
  }

  /** What goes on is in this phase now. */
  tell(phase: string): void {
    if (this.#mark === null || this.#mark.phase === phase) return;
    this.#mark.phase = phase;
    this.#write();
  }

  /** What {@link enter} began has ended, well or not. */
  leave(): void {
    this.#running--;
    if (this.#running === 0) this.#end();
  }

  /** The engine has answered. */
  answered(): void {
    if (this.#history === null || this.#store === null) return;
    writeHistory(this.#store, this.#host.source, withAnswer(this.#history, this.#config));
    this.#history = null;
  }

  #begin(phase: string): void {
    const { locks, events } = this.#host;
    const mark = { id: randomName(), phase, isHeld: false, release: () => {} };
    const released = new Promise<void>((resolve) => {
      mark.release = resolve;
    });
    this.#mark = mark;
    this.#isLeft = false; // What begins now runs in a page that is there.
    const held = locks.request(lockName(mark.id), () => {
      mark.isHeld = true;
      this.#write();
      return released;
    });
    held.catch(() => {}); // Refused to opaque origins: without the lock nobody could tell that this tab lives.
    for (const type of EVENTS) events.addEventListener(type, this.#onEvent);
  }

  #end(): void {
    for (const type of EVENTS) this.#host.events.removeEventListener(type, this.#onEvent);
    const mark = this.#mark;
    this.#mark = null;
    // The mark goes before its lock: the other way round it would be that of a dead tab for a moment.
    if (mark !== null) this.#store?.clearMark(mark.id);
    mark?.release();
  }

  #write(): void {
    if (this.#mark === null || !this.#mark.isHeld || this.#isLeft) return;
    const { id, phase } = this.#mark;
    const { source } = this.#host;
    const hidden = this.#host.isHidden();
    this.#store?.setMark(id, { kind: "phase", source, phase, hidden, ...this.#config });
  }

  /** A page that is left in order says so, and may be come back to; one that is killed does not. */
  readonly #onEvent = ({ type }: Event): void => {
    if (type === "pagehide") {
      this.#isLeft = true;
      if (this.#mark !== null) this.#store?.clearMark(this.#mark.id);
    } else {
      if (type === "pageshow") this.#isLeft = false;
      this.#write();
    }
  };
}

/** The tabs that died over a source; `take`: their marks are taken away, so that nobody finds them again. */
async function killsIn(
  store: MarkStore,
  { source, locks }: Pick<MarkHost, "source" | "locks">,
  { take }: { take: boolean },
): Promise<Kill[]> {
  const kills: Kill[] = [];
  for (const { id, kill } of phaseMarks(store, source)) {
    await locks.request(lockName(id), { ifAvailable: true }, (lock) => {
      // Its tab lives; or it has ended meanwhile, in order or counted by another tab.
      if (lock === null || !phaseMarks(store, source).some((mark) => mark.id === id)) return;
      if (take) store.clearMark(id);
      kills.push(kill);
    });
  }
  return kills;
}

function phaseMarks(store: MarkStore, source: string): { id: string; kill: Kill }[] {
  return store.marks().flatMap(({ id, at, value }) => {
    if (!isOf(value, "phase", source)) return [];
    const { phase, threads, contextLength, hidden } = value;
    if (typeof phase !== "string" || !isCount(threads) || !isCount(contextLength)) return [];
    return [{ id, kill: { phase, at, threads, contextLength, hidden: hidden === true } }];
  });
}

/** The latest history of the source: two tabs at once may have written one each. */
function readHistory(store: MarkStore, source: string): History | null {
  const found = store.marks().flatMap(({ value }) => {
    if (!isOf(value, "history", source)) return [];
    const { steps, inARow, phase, at, threads, contextLength } = value;
    if (!isCount(steps) || !isCount(inARow) || !isCount(threads) || !isCount(contextLength)) return [];
    if (typeof phase !== "string" || !isCount(at) || Date.now() - at > MEMORY_MS) return [];
    return [{ steps, inARow, phase, at, threads, contextLength }];
  });
  return latest(found);
}

/** Replaces the history of the source; null forgets it. */
function writeHistory(store: MarkStore, source: string, history: History | null): void {
  for (const { id, value } of store.marks()) if (isOf(value, "history", source)) store.clearMark(id);
  if (history !== null) store.setMark(randomName(), { kind: "history", source, ...history });
}

function isOf(value: unknown, kind: string, source: string): value is Record<string, unknown> {
  const fields = value as Record<string, unknown> | null;
  return typeof fields === "object" && fields?.kind === kind && fields.source === source;
}

function isCount(value: unknown): value is number {
  return typeof value === "number" && Number.isFinite(value) && value >= 0;
}

function latest<T extends { at: number }>(all: T[]): T | null {
  return all.reduce<T | null>((last, one) => (last === null || one.at > last.at ? one : last), null);
}

/** The store, or null where it cannot be had in time: then all goes on as if nothing had been marked. */
async function openInTime(host: MarkHost, signal?: AbortSignal): Promise<MarkStore | null> {
  if (host.isEmpty()) return null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, STORE_LIMIT_MS, null);
    signal?.addEventListener("abort", () => resolve(null), { once: true });
  });
  try {
    return await Promise.race([host.open(), late]);
  } catch {
    return null;
  } finally {
    clearTimeout(timer);
  }
}

function lockName(id: string): string {
  return `qandle-mark-${id}`;
}
