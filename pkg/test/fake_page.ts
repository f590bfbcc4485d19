// What marks need from a browser, played by a test: a storage and Web Locks that all tabs share, and tabs that are left in
// order or killed.

import type { Mark, MarkHost, MarkStore } from "../src/marks.js";
import { MODEL } from "./bench.js";

/** Locks that are held, by name, and whose tab holds them. */
type Held = Map<string, FakeTab>;

/** One origin's storage and locks. */
export class FakeOrigin {
  readonly marks = new Map<string, Mark>();
  readonly held: Held = new Map();
  /** Opens of the store, by all tabs. */
  opened = 0;

  tab(source = MODEL): FakeTab {
    return new FakeTab(this, source);
  }

  /** Values of the marks of this kind. */
  ofKind(kind: string): Record<string, unknown>[] {
    const values = [...this.marks.values()].map(({ value }) => value as Record<string, unknown>);
    return values.filter((value) => value.kind === kind);
  }
}

/** A tab that is alive until it is killed. */
export class FakeTab implements MarkHost {
  readonly events = new EventTarget();
  hidden = false;
  /** The store comes when this resolves. */
  module: Promise<void> = Promise.resolve();
  readonly source: string;
  readonly #origin: FakeOrigin;
  #isDead = false;

  constructor(origin: FakeOrigin, source: string) {
    this.#origin = origin;
    this.source = source;
  }

  isEmpty(): boolean {
    return this.#origin.marks.size === 0;
  }

  isHidden(): boolean {
    return this.hidden;
  }

  async open(): Promise<MarkStore> {
    this.#origin.opened++;
    await this.module;
    const { marks } = this.#origin;
    return {
      setMark: (id, value) => {
        if (!this.#isDead) marks.set(id, { id, at: Date.now(), value: structuredClone(value) });
      },
      marks: () => structuredClone([...marks.values()]),
      clearMark: (id) => {
        if (!this.#isDead) marks.delete(id);
      },
    };
  }

  locks = {
    request: (async (
      name: string,
      ...rest: [LockOptions, LockGrantedCallback<unknown>] | [LockGrantedCallback<unknown>]
    ) => {
      const { held } = this.#origin;
      const [options, callback] = rest.length === 1 ? [{} as LockOptions, rest[0]] : rest;
      await Promise.resolve();
      if (held.has(name)) {
        if (options.ifAvailable) return callback(null);
        throw new Error(`a test waits for the lock ${name}`);
      }
      held.set(name, this);
      try {
        return await callback({ name, mode: "exclusive" });
      } finally {
        if (held.get(name) === this) held.delete(name);
      }
    }) as LockManager["request"],
  };

  fire(type: string): void {
    this.events.dispatchEvent(new Event(type));
  }

  /** Silently: no event, no clean-up; only its locks are free. */
  kill(): void {
    this.#isDead = true;
    for (const [name, tab] of this.#origin.held) if (tab === this) this.#origin.held.delete(name);
  }
}

/** After everything that is under way. */
export function settled(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, 5));
}
