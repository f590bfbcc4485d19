// The page's half of a threaded build's pool: makes the threads, shares the engine's module and memory with them, and
// says when all listen, or why one cannot or no longer does.

import { failure, messageOf, type QandleError } from "./errors.js";
import type { ThreadInit, ThreadReply, ThreadsWanted } from "./protocol.js";
import type { Tier } from "./types.js";

/** How long threads may take to start, in ms: they share one compiled module, but fetch its script. */
export const THREADS_LIMIT_MS = 30_000;

/** The part of a thread's `Worker` that is used. */
export interface ThreadLike {
  postMessage(message: ThreadInit): void;
  addEventListener(type: "message", listener: (event: { data: unknown }) => void): void;
  addEventListener(
    type: "error",
    listener: (event: { message?: string; preventDefault?(): void }) => void,
  ): void;
  terminate(): void;
}

/** The threads of one engine. */
export interface Threads {
  /** Resolves once all listen. */
  ready: Promise<void>;
  /** Ends them. */
  terminate(): void;
}

/** Starts what the engine's worker asked for. `onDeath` is called once when a thread that had started traps. */
export function startThreads(
  { count, init, receiver }: ThreadsWanted,
  { tier, create, onDeath }: { tier: Tier; create(): ThreadLike; onDeath(why: string): void },
): Threads {
  // Kept, as in some browsers a Worker object that is collected ends its thread.
  const threads: ThreadLike[] = [];
  let timer: ReturnType<typeof setTimeout> | undefined;
  const terminate = () => {
    clearTimeout(timer);
    for (const thread of threads.splice(0)) thread.terminate();
  };
  const late = new Promise<never>((_, reject) => {
    const why = `they did not start within ${THREADS_LIMIT_MS / 1000} s`;
    timer = setTimeout(() => reject(notStarted(why)), THREADS_LIMIT_MS);
  });
  const start = async () => {
    for (let i = 0; i < count; i++) threads.push(create());
    await Promise.all(threads.map((thread) => started(thread, { tier, init, receiver }, onDeath)));
  };
  const ready = Promise.race([start(), late]).finally(() => clearTimeout(timer));
  return { ready, terminate };
}

function started(thread: ThreadLike, message: ThreadInit, onDeath: (why: string) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    thread.addEventListener("message", ({ data }) => {
      const reply = data as ThreadReply;
      switch (reply.type) {
        case "ready":
          return resolve();
        case "failed":
          return reject(notStarted(reply.message));
        case "fatal":
          return onDeath(`a thread trapped: ${reply.message}`);
        default:
          reply satisfies never;
      }
    });
    thread.addEventListener("error", (event) => {
      event.preventDefault?.();
      reject(notStarted(event.message || "its script could not be loaded"));
    });
    try {
      thread.postMessage(message);
    } catch (thrown) {
      reject(notStarted(messageOf(thrown)));
    }
  });
}

function notStarted(why: string): QandleError {
  return failure("worker_died", `the engine's threads could not be started: ${why}`);
}
