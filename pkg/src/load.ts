// `load`: options and source are checked, a build is chosen, a worker started (stepping down to one thread where
// threads do not start), and the model loaded from the first place that has it.

import { makeEngine } from "./engine.js";
import { failure, QandleError, throwIfAborted } from "./errors.js";
import { checkOptions, wireOptions } from "./options.js";
import type { WireSource } from "./protocol.js";
import { resolveSource } from "./source.js";
import { browserHost, type Link, type SpawnHost, startWorker } from "./spawn.js";
import { choose, type Plan, type Platform, platform } from "./tiers.js";
import type { Engine, EngineInfo, LoadOptions, ModelSource, Notice, Progress } from "./types.js";

/** What a load takes from the browser; a test brings its own. */
export interface LoadHost extends SpawnHost {
  platform(): Platform;
}

/** The loads of a host. */
export function makeLoad(host: LoadHost): (source: ModelSource, options?: LoadOptions) => Promise<Engine> {
  return async (source, options = {}) => {
    checkOptions(options);
    const { signal } = options;
    const places = resolveSource(source, options.mirrors);
    throwIfAborted(signal);
    const plan = choose(options, host.platform());

    const memory: EngineInfo["memory"] = {
      wasmBytes: 0,
      weightsBytes: 0,
      kvBytes: 0,
      responseBytes: 0,
      tokenizerBytes: 0,
    };
    const onNotice = (notice: Notice) => tell(options.onNotice?.bind(options), notice);
    plan.notices.forEach(onNotice);
    const onMemory = (update: EngineInfo["memory"]) => Object.assign(memory, update);
    const link = await startSteppingDown(plan, host, {
      assetsUrl: options.assetsUrl,
      signal,
      onMemory,
      onNotice,
    });
    try {
      const info = await loadFirst(link, places, options);
      Object.assign(memory, info.memory);
      const runtime = { ...info.runtime, isolated: host.platform().isolated };
      return makeEngine(link, { ...info, runtime, memory });
    } catch (error) {
      // The worker may still be writing what it fetched: it is asked to close, the caller need not wait for it.
      void link.close();
      throw error;
    }
  };
}

/**
 * Loads a model and resolves once it can answer. Nothing is fetched before this is called.
 *
 * @throws {QandleError} with its `code`; a `DOMException` named `AbortError` when `options.signal` fires.
 */
export function load(source: ModelSource, options?: LoadOptions): Promise<Engine> {
  return browserLoad(source, options);
}

const browserLoad = makeLoad({
  createWorker: browserHost.createWorker,
  createThread: browserHost.createThread,
  get locks() {
    return browserHost.locks;
  },
  platform,
});

type StartOptions = Omit<Parameters<typeof startWorker>[0], "tier" | "threads">;

/** Threads may fail to start for reasons that no probe shows (policies, memory): then one thread does. */
async function startSteppingDown(
  { tier, threads }: Plan,
  host: SpawnHost,
  options: StartOptions,
): Promise<Link> {
  try {
    return await startWorker({ ...options, tier, threads }, host);
  } catch (error) {
    if (threads === 1 || !(error instanceof QandleError)) throw error;
    const link = await startWorker({ ...options, tier, threads: 1 }, host);
    const message = `${threads} threads could not be started, so one is used: ${error.message}`;
    options.onNotice?.({ code: "stepped_down", message, detail: { threads, cause: error.code } });
    return link;
  }
}

/** Tries each place while it is the place that fails, not the model. */
async function loadFirst(link: Link, places: WireSource[], options: LoadOptions): Promise<EngineInfo> {
  let reached = 0;
  const onProgress = (progress: Progress) => {
    reached = Math.min(1, Math.max(reached, progress.fraction));
    tell(options.onProgress?.bind(options), { ...progress, fraction: reached });
  };
  let last: QandleError = failure("invalid_request", "there is no place to load from");
  for (const source of places) {
    try {
      return await link.client.request(
        "load",
        { source, options: wireOptions(options) },
        {
          signal: options.signal,
          onEvent: (event) => {
            if (event.type === "progress") onProgress(event.progress);
          },
        },
      );
    } catch (error) {
      const elsewhere =
        error instanceof QandleError && (error.code === "network" || error.code === "http_status");
      if (!elsewhere) throw error;
      last = error;
    }
  }
  throw last;
}

/** Calls back; what the callback throws is reported as from an event listener and does not break the load. */
function tell<T>(callback: ((value: T) => void) | undefined, value: T): void {
  try {
    callback?.(value);
  } catch (thrown) {
    reportError(thrown);
  }
}
