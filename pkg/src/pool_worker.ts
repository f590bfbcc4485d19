// Entry of one thread of the pool, or of the worker that stores downloads. A thread shares the engine's module and memory, and works until it is terminated. While it
// works the engine's own thread may be waiting for it, so a trap is told to the page directly.

import { messageOf } from "./errors.js";
import { serveKeeper } from "./keeper.js";
import { holdLock } from "./lock.js";
import type { KeeperInit, ThreadInit, ThreadReply, ThreadShare } from "./protocol.js";
import type { Tier } from "./types.js";

/** What a threaded build exports to a pool thread. */
export interface ThreadGlue {
  default(init: ThreadShare["init"]): Promise<unknown>;
  /** Runs the pool's loop; returns when the pool ends. */
  wbg_rayon_start_worker(receiver: number): void;
}

function importGlue(tier: Tier): Promise<ThreadGlue> {
  switch (tier) {
    case "simd128":
      return import("./wasm/qandle_simd128_threads.js");
    case "relaxed":
      return import("./wasm/qandle_relaxed_threads.js");
    default:
      throw new Error(`unknown tier ${tier satisfies never}`);
  }
}

async function run({ tier, lockName }: ThreadInit, { init, receiver }: ThreadShare): Promise<void> {
  let glue: ThreadGlue;
  try {
    glue = await importGlue(tier);
    await glue.default(init);
    await holdLock(globalThis.navigator?.locks, lockName);
  } catch (thrown) {
    return reply({ type: "failed", message: messageOf(thrown) });
  }
  reply({ type: "ready" });
  try {
    glue.wbg_rayon_start_worker(receiver);
  } catch (trap) {
    reply({ type: "fatal", message: messageOf(trap) });
  }
}

function reply(message: ThreadReply): void {
  globalThis.postMessage(message);
}

globalThis.addEventListener(
  "message",
  ({ data: init }: MessageEvent<ThreadInit | KeeperInit>) => {
    if ("keeper" in init) return serveKeeper(init.keeper, () => globalThis.close());
    const { port } = init;
    port.onmessageerror = () => reply({ type: "failed", message: "the engine's memory did not arrive" });
    port.onmessage = ({ data: share }: MessageEvent<ThreadShare>) => void run(init, share);
  },
  { once: true },
);
