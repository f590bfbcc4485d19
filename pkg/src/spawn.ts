// Starts the worker and its threads and knows when one is gone: error events, `fatal` messages, a Web Lock that the worker
// holds for ever (getting it means that the worker is gone; a killed worker fires no event), and a channel on which a
// pool thread's panic is announced while the engine's own thread waits for it.

import { Client, type ClientHooks } from "./client.js";
import { openDeathChannel } from "./death_channel.js";
import { assetsFolder } from "./assets.js";
import { abortError, errorFromWire, failure, messageOf, QandleError } from "./errors.js";
import { isForeign, moduleWorker } from "./module_worker.js";
import { randomName, watchLock } from "./lock.js";
import type { Endpoint, Init, PoolMessage, ThreadsReady, WorkerState } from "./protocol.js";
import { startThreads, type ThreadLike, type Threads } from "./threads.js";
import type { Tier } from "./types.js";

/** How long a closing worker may take before it is terminated, in ms. */
export const CLOSE_GRACE_MS = 1000;

/**
 * How long a worker's script may take to arrive and take the lock, in ms. One that is ended before it holds the lock
 * tells nobody.
 */
export const START_LIMIT_MS = 60_000;

/** How long its threads may take to start, in ms: they share one compiled module, but fetch its script. */
export const THREADS_LIMIT_MS = 30_000;

/** The part of a `Worker` that is used. */
export interface WorkerLike extends Endpoint {
  addEventListener(type: "message" | "messageerror", listener: (event: { data: unknown }) => void): void;
  addEventListener(
    type: "error",
    listener: (event: { message?: string; preventDefault?(): void }) => void,
  ): void;
  terminate(): void;
}

/** What a start needs from the platform; a test brings its own. */
export interface SpawnHost {
  createWorker(assetsUrl: string | URL | undefined): WorkerLike;
  createThread(assetsUrl: string | URL | undefined): ThreadLike;
  locks: Pick<LockManager, "request"> | undefined;
}

/** Options of {@link startWorker}. */
export interface SpawnOptions extends Omit<ClientHooks, "onState"> {
  tier: Tier;
  threads: number;
  assetsUrl?: string | URL;
  signal?: AbortSignal;
}

/** A worker whose engine answers. */
export interface Link {
  client: Client;
  /** Rejects what is pending with `closed`, asks the worker to close, ends it. The same promise each time. */
  close(): Promise<void>;
}

/** The browser's own worker and locks. */
export const browserHost: SpawnHost = {
  createWorker,
  createThread,
  get locks() {
    return globalThis.navigator?.locks;
  },
};

/** Starts a worker with one build of the engine; rejects when it cannot, or when the signal fires. */
export function startWorker(options: SpawnOptions, host: SpawnHost = browserHost): Promise<Link> {
  const { tier, threads, assetsUrl, signal, ...hooks } = options;
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(abortError());
    const lockName = `qandle-${randomName()}`;
    const worker = create(host, assetsUrl);
    const lockRequest = new AbortController();
    const channel = openDeathChannel(lockName);
    let closing: Promise<void> | undefined;
    let pool: Threads | undefined;
    let poolTimer: ReturnType<typeof setTimeout> | undefined;
    const keepers: (ThreadLike | undefined)[] = [];
    let released = false;

    const release = () => {
      released = true;
      clearTimeout(startTimer);
      clearTimeout(poolTimer);
      signal?.removeEventListener("abort", onAbort);
      worker.terminate();
      pool?.terminate();
      for (const keeper of keepers.splice(0)) keeper?.terminate();
      lockRequest.abort();
      channel?.close();
    };
    const die = (error: QandleError | DOMException) => {
      release();
      reject(error);
      client.end(error instanceof DOMException ? failure("closed", "the load was aborted") : error);
    };
    const died = (why: string) => die(failure("worker_died", `the engine's worker died: ${why}`));
    const startTimer = setTimeout(
      () => died(`its script did not start within ${START_LIMIT_MS / 1000} s`),
      START_LIMIT_MS,
    );
    const onAbort = () => die(abortError());
    const close = () => {
      closing ??= client.close(failure("closed", "the engine was closed"), CLOSE_GRACE_MS).finally(release);
      return closing;
    };
    const watch = (name: string, onGone: () => void) =>
      watchLock(host.locks, name, { signal: lockRequest.signal, onGone });
    const onState = (state: WorkerState) => {
      if (released) return;
      switch (state.type) {
        case "locked":
          clearTimeout(startTimer);
          return watch(lockName, () => died("it was ended from outside"));
        case "threads":
          poolTimer = setTimeout(
            () => died(`its threads did not start within ${THREADS_LIMIT_MS / 1000} s`),
            THREADS_LIMIT_MS,
          );
          pool = startThreads(state, {
            tier,
            lockName,
            create: () => host.createThread(assetsUrl),
            watch,
            onDeath: died,
          });
          return void pool.ready.then(
            () => worker.postMessage({ type: "threads" } satisfies ThreadsReady),
            (thrown: unknown) => died(messageOf(thrown)),
          );
        case "keeper":
          keepers.push(startKeeper(host, { port: state.port, assetsUrl }));
          return;
        case "ready":
          clearTimeout(poolTimer);
          signal?.removeEventListener("abort", onAbort);
          return resolve({ client, close });
        case "fatal": {
          const error = errorFromWire(state.error);
          const plain = error instanceof DOMException || error.code === "worker_died";
          return plain ? died(error.message) : die(error);
        }
        default:
          state satisfies never;
      }
    };
    const client = new Client(worker, { ...hooks, onState });

    signal?.addEventListener("abort", onAbort, { once: true });
    worker.addEventListener("error", (event) => {
      event.preventDefault?.();
      // A script that could not be fetched or was refused by a policy fires an event without a message.
      died(
        event.message ||
          "its script could not be loaded (missing file, or refused by a content security policy)",
      );
    });
    worker.addEventListener("messageerror", () => died("a message could not be read"));
    if (channel !== undefined) {
      channel.onmessage = ({ data }: MessageEvent<PoolMessage>) => {
        if (data?.type === "fatal") died(data.message);
      };
    }
    worker.postMessage({ type: "init", tier, threads, lockName } satisfies Init);
  });
}

/** Starts a worker that stores downloads. Where none can be made, nobody answers the port, and the engine does it itself. */
function startKeeper(
  host: SpawnHost,
  { port, assetsUrl }: { port: MessagePort; assetsUrl: string | URL | undefined },
): ThreadLike | undefined {
  try {
    const keeper = host.createThread(assetsUrl);
    keeper.addEventListener("error", (event) => event.preventDefault?.());
    keeper.postMessage({ keeper: port }, [port]);
    return keeper;
  } catch {
    return undefined;
  }
}

/** A worker, or why the browser refuses to make one. */
function create(host: SpawnHost, assetsUrl: string | URL | undefined): WorkerLike {
  try {
    return host.createWorker(assetsUrl);
  } catch (cause) {
    if (cause instanceof QandleError) throw cause;
    throw failure("worker_died", `the engine's worker could not be made: ${messageOf(cause)}`, { cause });
  }
}

// The literal `new Worker(new URL(…))` is what bundlers look for.
function createWorker(assetsUrl: string | URL | undefined): WorkerLike {
  const elsewhere = placeOf("worker.js", assetsUrl);
  if (elsewhere !== undefined) return moduleWorker(elsewhere);
  return new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
}

function createThread(assetsUrl: string | URL | undefined): ThreadLike {
  const elsewhere = placeOf("pool_worker.js", assetsUrl);
  if (elsewhere !== undefined) return moduleWorker(elsewhere);
  return new Worker(new URL("./pool_worker.js", import.meta.url), { type: "module" });
}

/** Where a script lies that is not beside this file on the page's own origin. Asked first: Firefox only fires an event. */
function placeOf(name: string, assetsUrl: string | URL | undefined): URL | undefined {
  if (assetsUrl !== undefined) return new URL(name, assetsFolder(assetsUrl));
  return isForeign(import.meta.url) ? new URL(import.meta.url.replace(/[^/]*$/, name)) : undefined;
}
