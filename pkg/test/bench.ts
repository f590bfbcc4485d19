// `load` on a platform that a test plays: workers, threads and locks that do what it says.

import type { LoadHost } from "../src/load.js";
import { makeLoad } from "../src/load.js";
import type { Platform } from "../src/tiers.js";
import type { Engine, LoadOptions, ModelSource, Notice } from "../src/types.js";
import { FakeWorker, INFO } from "./fake_worker.js";

export const MODEL = "http://localhost/m.gguf";
export const PLATFORM: Platform = {
  validate: () => true,
  isolated: true,
  sharedMemory: true,
  cores: 4,
  workers: true,
};
export const BODY = { messages: [{ role: "user" as const, content: "hi" }] };

/** Locks as the platform's: the request waits until `free` is called for its name, as when the worker ends. */
export class FakeLocks {
  readonly #waiting = new Map<string, () => void>();

  request = ((name: string, options: LockOptions, got: () => void) =>
    new Promise<void>((resolve, reject) => {
      this.#waiting.set(name, () => resolve(got()));
      options.signal?.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    })) as LockManager["request"];

  free(name: string): void {
    this.#waiting.get(name)?.();
  }
}

export class Bench {
  readonly workers: FakeWorker[] = [];
  readonly threads: FakeWorker[] = [];
  readonly locks = new FakeLocks();
  readonly notices: Notice[] = [];
  platform = PLATFORM;
  /** Where marks of a source are kept; nowhere unless a test says so. */
  marks: LoadHost["marks"] = () => undefined;

  load(source: ModelSource = MODEL, options: LoadOptions = {}): Promise<Engine> {
    const host: LoadHost = {
      platform: () => this.platform,
      marks: (source, assetsUrl) => this.marks(source, assetsUrl),
      locks: this.locks as Pick<LockManager, "request">,
      createWorker: () => {
        const worker = new FakeWorker();
        this.workers.push(worker);
        return worker.page;
      },
      createThread: () => {
        const thread = new FakeWorker();
        this.threads.push(thread);
        return thread.page;
      },
    };
    return makeLoad(host)(source, { onNotice: (notice) => this.notices.push(notice), ...options });
  }

  async worker(nth = 0): Promise<FakeWorker> {
    for (;;) {
      const worker = this.workers[nth];
      if (worker !== undefined) return worker;
      await new Promise((resolve) => setTimeout(resolve, 1));
    }
  }

  /** The worker after its start, and the name of its lock. */
  async started(nth = 0): Promise<{ worker: FakeWorker; lockName: string }> {
    const worker = await this.worker(nth);
    const { lockName = "" } = await worker.take(({ type }) => type === "init");
    worker.say({ type: "locked" });
    worker.say({ type: "ready" });
    return { worker, lockName };
  }

  async engine(options: LoadOptions = {}): Promise<{ engine: Engine; worker: FakeWorker; lockName: string }> {
    const loading = this.load(MODEL, options);
    const { worker, lockName } = await this.started();
    worker.done((await worker.request("load")).id, INFO);
    return { engine: await loading, worker, lockName };
  }
}

/** Closes what a test left open, so that the process can end. */
export async function bench(run: (bench: Bench) => Promise<void>): Promise<void> {
  const it = new Bench();
  try {
    await run(it);
  } finally {
    for (const worker of it.workers) {
      worker.crash("end of test");
      worker.close();
    }
  }
}
