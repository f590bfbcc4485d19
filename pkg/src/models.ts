// `models`: what is kept on this device, and what a model would take. Each call starts a worker with the smallest build
// that runs here, asks it, and ends it.

import { failure } from "./errors.js";
import { filesOfPlace, resolveSource } from "./source.js";
import { browserHost, startWorker } from "./spawn.js";
import type { Method, Params, Result, WireFile, WireSource } from "./protocol.js";
import { choose, platform } from "./tiers.js";
import type { Models, ModelSource } from "./types.js";

type Ask = <M extends Method>(method: M, params: Params<M>) => Promise<Result<M>>;

/** Some questions to one worker, which is ended after them. */
async function withWorker<R>(work: (ask: Ask) => Promise<R>, signal?: AbortSignal): Promise<R> {
  const { tier } = choose({ threads: 1 }, platform());
  const link = await startWorker({ tier, threads: 1, signal }, browserHost);
  try {
    return await work((method, params) => link.client.request(method, params, { signal }));
  } finally {
    void link.close();
  }
}

/** One question about each file of a source; those that may be missing are asked about last. */
function eachFile<R>(
  source: ModelSource,
  work: (ask: Ask, file: WireFile, needed: boolean) => Promise<R>,
): Promise<R[]> {
  const { needed, optional } = filesOfPlace(placeOf(source));
  return withWorker(async (ask) => {
    const answers: R[] = [];
    for (const file of needed) answers.push(await work(ask, file, true));
    for (const file of optional) answers.push(await work(ask, file, false));
    return answers;
  });
}

/** The place that is asked about: the first, as a load would take it. */
function placeOf(source: ModelSource): WireSource {
  const [first] = resolveSource(source);
  // There is always one.
  return first as WireSource;
}

/** The public functions. */
export const models: Models = {
  list: () => withWorker((ask) => ask("models.list", {})),
  estimate: async (source, { contextLength, signal } = {}) => {
    const place = placeOf(source);
    return withWorker((ask) => ask("models.estimate", { source: place, contextLength }), signal);
  },
  has: async (source) => {
    const found = await eachFile(
      source,
      async (ask, file, needed) => !needed || ask("models.has", { source: file }),
    );
    return found.every((there) => there);
  },
  verify: async (source) => {
    const sum = { chunks: 0, bad: 0, repaired: 0 };
    await eachFile(source, async (ask, file, needed) => {
      if (!needed && !(await ask("models.has", { source: file }))) return;
      const { chunks, bad, repaired } = await ask("models.verify", { source: file });
      sum.chunks += chunks;
      sum.bad += bad;
      sum.repaired += repaired;
    });
    return sum;
  },
  delete: async (source) => {
    await eachFile(source, (ask, file) => ask("models.delete", { source: file }));
  },
  import: async (file, as) => {
    const { needed, optional } = filesOfPlace(placeOf(as));
    const [place, ...others] = needed;
    if (place === undefined || "blob" in place || others.length + optional.length > 0)
      throw failure("invalid_request", "a file is kept under one URL, or one hub's name");
    await withWorker((ask) => ask("models.import", { file: { blob: file }, source: place }));
  },
  makeRoom: async (bytes) => {
    if (!(Number.isFinite(bytes) && bytes >= 0))
      throw failure("invalid_request", "the bytes to make room for must be a number, zero or more");
    return withWorker((ask) => ask("models.makeRoom", { bytes }));
  },
  storage: async () => {
    const found = await withWorker((ask) => ask("models.storage", {}));
    // Workers do not know it, and opaque origins are refused.
    const persisted = await globalThis.navigator?.storage?.persisted?.().catch(() => false);
    return { ...found, persisted: persisted ?? false };
  },
};
