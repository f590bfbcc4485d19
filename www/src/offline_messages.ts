// What the page says to its service worker: types only.

import type { Tier } from "qandle";

export type ToServiceWorker =
  /** Keep the engine's builds for this instruction set. */
  | { type: "keep"; tier: Tier }
  /** Replace the version of the page that is being served. */
  | { type: "takeOver" };
