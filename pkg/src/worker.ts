// Entry of the engine's worker. The imports and URLs are literal, one for each build, so that bundlers find and emit
// the files; a switch picks one at run time.

import { type LoadGlue, runShell, type Scope } from "./shell.js";

const loadGlue: LoadGlue = ({ tier, threaded }) => {
  switch (tier) {
    case "simd128":
      return threaded
        ? {
            glue: import("./wasm/qandle_simd128_threads.js"),
            wasm: new URL("./wasm/qandle_simd128_threads.wasm", import.meta.url),
          }
        : {
            glue: import("./wasm/qandle_simd128.js"),
            wasm: new URL("./wasm/qandle_simd128.wasm", import.meta.url),
          };
    case "relaxed":
      return threaded
        ? {
            glue: import("./wasm/qandle_relaxed_threads.js"),
            wasm: new URL("./wasm/qandle_relaxed_threads.wasm", import.meta.url),
          }
        : {
            glue: import("./wasm/qandle_relaxed.js"),
            wasm: new URL("./wasm/qandle_relaxed.wasm", import.meta.url),
          };
    default:
      throw new Error(`unknown tier ${tier satisfies never}`);
  }
};

runShell(globalThis as unknown as Scope, loadGlue);
