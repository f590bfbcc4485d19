// What the contract promises and this version does not serve yet: the one list. Each answers with `invalid_request`.

import { failure } from "./errors.js";
import type { Engine } from "./types.js";

function unavailable(name: string): () => Promise<never> {
  return () => Promise.reject(failure("invalid_request", `${name} is not available in this version`));
}

/** The page's own files are not asked about. */
export const offlineReady: Engine["offlineReady"] = unavailable("offlineReady");
