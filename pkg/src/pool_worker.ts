// Entry of one thread of the pool: shares the engine's module and memory, and works until it is terminated. While it
// works the engine's own thread may be waiting for it, so a trap is told to the page directly.

import { messageOf } from "./errors.js";
import type { ThreadInit, ThreadReply } from "./protocol.js";
import type { Tier } from "./types.js";

/** What a threaded build exports to a pool thread. */
export interface ThreadGlue {
  default(init: ThreadInit["init"]): Promise<unknown>;
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

async function run({ tier, init, receiver }: ThreadInit): Promise<void> {
  const reply = (message: ThreadReply) => globalThis.postMessage(message);
  let glue: ThreadGlue;
  try {
    glue = await importGlue(tier);
    await glue.default(init);
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

globalThis.addEventListener("message", ({ data }: MessageEvent<ThreadInit>) => void run(data), {
  once: true,
});
