// Starts the threads of a threaded build: the JavaScript half of wasm-bindgen-rayon's pool, which the glue calls as
// `startWorkers`. In place of that crate's own file it works with and without a bundler, under a policy that allows
// no blob workers, and a thread that cannot start or traps is told instead of waited for.

import { failure, messageOf } from "./errors.js";
import { isForeign, moduleWorker } from "./module_worker.js";
import type { Tier } from "./types.js";

/** The Rust side's builder, in glue. */
interface PoolBuilder {
  numThreads(): number;
  /** Address of the channel from which threads take their work. */
  receiver(): number;
  /** Builds the pool once every thread listens. */
  build(): void;
}

/** First message to a pool thread. */
export interface PoolInit {
  tier: Tier;
  lockName: string;
  init: { module_or_path: WebAssembly.Module; memory: WebAssembly.Memory };
  receiver: number;
}

/** A pool thread's only message. */
export type PoolReply = { type: "ready" } | { type: "failed"; message: string };

let prepared: { tier: Tier; lockName: string } | undefined;

// Kept so that the threads' Worker objects are never collected, which ends them in some browsers.
let threads: Worker[] = [];

/** Says which build the threads are to import; before the glue's `initThreadPool`. */
export function preparePool(pool: { tier: Tier; lockName: string }): void {
  prepared = pool;
}

/** Called by the glue with its compiled module and its shared memory. */
export async function startWorkers(
  module: WebAssembly.Module,
  memory: WebAssembly.Memory,
  builder: PoolBuilder,
): Promise<void> {
  if (prepared === undefined) throw failure("worker_died", "the pool was started before it was prepared");
  const init = { module_or_path: module, memory };
  const message: PoolInit = { ...prepared, init, receiver: builder.receiver() };
  threads = Array.from({ length: builder.numThreads() }, createThread);
  await Promise.all(threads.map((thread) => started(thread, message)));
  builder.build();
}

function createThread(): Worker {
  // Never so in a bundle, so the name of the file is known. Asked first, as Firefox only fires an event when it refuses.
  if (isForeign(import.meta.url)) {
    return moduleWorker(new URL(import.meta.url.replace(/[^/]*$/, "pool_worker.js")));
  }
  return new Worker(new URL("./pool_worker.js", import.meta.url), { type: "module" });
}

function started(thread: Worker, message: PoolInit): Promise<void> {
  return new Promise((resolve, reject) => {
    const fail = (why: string) => reject(failure("worker_died", `a thread could not be started: ${why}`));
    thread.addEventListener("message", ({ data }: MessageEvent<PoolReply>) => {
      if (data.type === "ready") resolve();
      else fail(data.message);
    });
    thread.addEventListener("error", (event) => {
      event.preventDefault();
      fail(event.message || "its script could not be loaded");
    });
    try {
      thread.postMessage(message);
    } catch (thrown) {
      fail(messageOf(thrown));
    }
  });
}
