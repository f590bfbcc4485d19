// Which build of the engine this browser can run: a few bytes are validated, nothing is fetched. Owns the choice of
// tier and threads; does not own what happens when a thread then fails to start (spawn.ts).

import { failure } from "./errors.js";
import type { LoadOptions, Notice, Tier } from "./types.js";

/** What the probe looks at; the browser's own globals unless a test brings others. */
export interface Platform {
  validate: ((bytes: Uint8Array<ArrayBuffer>) => boolean) | undefined;
  isolated: boolean;
  sharedMemory: boolean;
  cores: number;
  workers: boolean;
}

/** A tier and a number of threads, with what is worth telling about the choice. */
export interface Plan {
  tier: Tier;
  threads: number;
  notices: Notice[];
}

/** Most threads that `auto` takes. */
export const AUTO_MAX_THREADS = 8;

// (func (result v128) i32.const 0, i8x16.splat), and the same with i8x16.relaxed_swizzle of two splats.
const HEAD = [0, 0x61, 0x73, 0x6d, 1, 0, 0, 0, 1, 5, 1, 0x60, 0, 1, 0x7b, 3, 2, 1, 0];
const SIMD128 = new Uint8Array([...HEAD, 0x0a, 8, 1, 6, 0, 0x41, 0, 0xfd, 0x0f, 0x0b]);
const RELAXED = new Uint8Array([
  ...HEAD,
  ...[0x0a, 15, 1, 13, 0, 0x41, 0, 0xfd, 0x0f, 0x41, 0, 0xfd, 0x0f, 0xfd, 0x80, 0x02, 0x0b],
]);

/** What this browser has. */
export function platform(): Platform {
  return {
    validate: typeof WebAssembly === "object" ? (bytes) => WebAssembly.validate(bytes) : undefined,
    isolated: globalThis.crossOriginIsolated === true,
    sharedMemory: typeof SharedArrayBuffer === "function",
    cores: globalThis.navigator?.hardwareConcurrency ?? 1,
    workers: typeof Worker === "function",
  };
}

/** The tiers that this browser can run; `relaxed` implies `simd128`. */
export function tiers(on: Platform): Tier[] {
  if (on.validate === undefined || !on.validate(SIMD128)) return [];
  return on.validate(RELAXED) ? ["simd128", "relaxed"] : ["simd128"];
}

/** Chooses the build to fetch, or refuses the browser before anything is fetched. */
export function choose(options: Pick<LoadOptions, "tier" | "threads">, on: Platform): Plan {
  const { tier: wanted = "auto", threads: asked = "auto" } = options;
  const offered = tiers(on);
  const best = offered.at(-1);
  if (best === undefined) {
    const found = on.validate === undefined ? "has no WebAssembly" : "has WebAssembly without SIMD (simd128)";
    throw failure("unsupported_browser", `WebAssembly SIMD is needed, but this browser ${found}`);
  }
  if (!on.workers)
    throw failure("unsupported_browser", "Web Workers are needed, but there is no Worker here");
  const tier = wanted === "auto" ? best : wanted;
  if (!offered.includes(tier)) {
    throw failure(
      "unsupported_browser",
      `the tier "${tier}" was asked for, but this browser has only ${offered}`,
      {
        detail: { offered },
      },
    );
  }
  const isolated = on.isolated && on.sharedMemory;
  if (!isolated && asked !== 1) {
    const message =
      "the page is not cross-origin isolated (COOP and COEP headers), so one thread is used instead of several";
    return { tier, threads: 1, notices: [{ code: "not_isolated", message, detail: { asked } }] };
  }
  return {
    tier,
    threads: asked === "auto" ? Math.max(1, Math.min(on.cores, AUTO_MAX_THREADS)) : asked,
    notices: [],
  };
}
