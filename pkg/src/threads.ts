// The page's half of a threaded build's pool: makes the threads, passes each the port through which the engine shares its
// module and memory, and says when all listen, or why one cannot or no longer does.

import { failure, messageOf, type QandleError } from "./errors.js";
import type { KeeperInit, ThreadInit, ThreadReply, ThreadsWanted } from "./protocol.js";
import type { Tier } from "./types.js";

/** The part of a thread's `Worker` that is used. */
export interface ThreadLike {
  postMessage(message: ThreadInit | KeeperInit, transfer: Transferable[]): void;
  addEventListener(type: "message" | "messageerror", listener: (event: { data: unknown }) => void): void;
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

/** What the page adds to what the engine's worker asked for. */
export interface ThreadHost {
  tier: Tier;
  /** Beginning of the names of the threads' locks. */
  lockName: string;
  create(): ThreadLike;
  /** Calls back when the holder of a lock is gone. */
  watch(lockName: string, onGone: () => void): void;
  /** Called when a thread that had started traps or is gone. */
  onDeath(why: string): void;
}

/** Starts what the engine's worker asked for. */
export function startThreads({ ports }: ThreadsWanted, host: ThreadHost): Threads {
  // Kept, as in some browsers a Worker object that is collected ends its thread.
  const threads: ThreadLike[] = [];
  const start = async () => {
    for (const _ of ports) threads.push(host.create());
    const all = threads.map((thread, i) => {
      const port = ports[i];
      if (port === undefined) throw notStarted("one has no port");
      return started(thread, { tier: host.tier, port, lockName: `${host.lockName}-${i}` }, host);
    });
    await Promise.all(all);
  };
  return {
    ready: start(),
    terminate: () => {
      for (const thread of threads.splice(0)) thread.terminate();
    },
  };
}

function started(thread: ThreadLike, message: ThreadInit, host: ThreadHost): Promise<void> {
  return new Promise((resolve, reject) => {
    let listens = false;
    const failed = (why: string) =>
      listens ? host.onDeath(`a thread ended: ${why}`) : reject(notStarted(why));
    thread.addEventListener("message", ({ data }) => {
      const reply = data as ThreadReply;
      switch (reply.type) {
        case "ready":
          listens = true;
          host.watch(message.lockName, () => failed("it was ended from outside"));
          return resolve();
        case "failed":
          return failed(reply.message);
        case "fatal":
          return host.onDeath(`a thread trapped: ${reply.message}`);
        default:
          reply satisfies never;
      }
    });
    thread.addEventListener("messageerror", () => failed("a message could not be read"));
    thread.addEventListener("error", (event) => {
      event.preventDefault?.();
      failed(event.message || "its script could not be loaded");
    });
    try {
      thread.postMessage(message, [message.port]);
    } catch (thrown) {
      failed(messageOf(thrown));
    }
  });
}

function notStarted(why: string): QandleError {
  return failure("worker_died", `the engine's threads could not be started: ${why}`);
}
