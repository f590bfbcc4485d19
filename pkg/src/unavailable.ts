// What the contract promises and this version does not serve yet: the one list. Each answers with `invalid_request`.

import { failure } from "./errors.js";
import type { Engine, Models } from "./types.js";

function unavailable(name: string): () => Promise<never> {
  return () => Promise.reject(failure("invalid_request", `${name} is not available in this version`));
}

/** Sessions are kept in memory only. */
export const saveSession: Engine["sessions"]["save"] = unavailable("sessions.save");

/** Weights are not kept on disk. */
export const offlineReady: Engine["offlineReady"] = unavailable("offlineReady");

/** Weights are not kept on disk. */
export const models: Models = {
  list: unavailable("models.list"),
  estimate: unavailable("models.estimate"),
  has: unavailable("models.has"),
  verify: unavailable("models.verify"),
  delete: unavailable("models.delete"),
  storage: unavailable("models.storage"),
};
