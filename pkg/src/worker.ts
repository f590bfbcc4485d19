// Entry of the engine's worker. The imports and URLs are literal, one for each build, so that bundlers find and emit
// the files; a switch picks one at run time.

import type { Glue } from "./protocol.js";
import { type LoadGlue, runShell, type Scope } from "./shell.js";

const loadGlue: LoadGlue = async ({ tier, threaded }) => {
  switch (tier) {
    case "simd128":
      return threaded
        ? build(
            import("./wasm/qandle_simd128_threads.js"),
            new URL("./wasm/qandle_simd128_threads.wasm", import.meta.url),
          )
        : build(import("./wasm/qandle_simd128.js"), new URL("./wasm/qandle_simd128.wasm", import.meta.url));
    case "relaxed":
      return threaded
        ? build(
            import("./wasm/qandle_relaxed_threads.js"),
            new URL("./wasm/qandle_relaxed_threads.wasm", import.meta.url),
          )
        : build(import("./wasm/qandle_relaxed.js"), new URL("./wasm/qandle_relaxed.wasm", import.meta.url));
    default:
      throw new Error(`unknown tier ${tier satisfies never}`);
  }
};

async function build(glue: Promise<Glue>, wasm: URL): Promise<{ glue: Glue; wasm: URL }> {
  return { glue: await glue, wasm };
}

runShell(globalThis as unknown as Scope, loadGlue);
