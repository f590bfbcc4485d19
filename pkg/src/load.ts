// `load`: options and source are checked, a build is chosen (a smaller configuration where the last one killed the tab), a
// worker started (with one thread where several do not start), and the model loaded from the first place that has it.

import { makeEngine } from "./engine.js";
import { type ErrorCode, failure, QandleError, throwIfAborted } from "./errors.js";
import { lookBack, type MarkHost, Marker } from "./marks.js";
import { checkOptions, wireOptions } from "./options.js";
import { markHost } from "./page.js";
import type { Method, WireSource } from "./protocol.js";
import { nameOf, resolveSource } from "./source.js";
import { browserHost, type Link, type SpawnHost, startWorker } from "./spawn.js";
import { DEFAULT_CONTEXT, NO_PAST, noticesOf, stepDown } from "./step_down.js";
import { choose, type Plan, type Platform, platform } from "./tiers.js";
import type { Engine, EngineInfo, LoadOptions, ModelSource, Notice, Progress } from "./types.js";

/** What a load takes from the browser; a test brings its own. */
export interface LoadHost extends SpawnHost {
  platform(): Platform;
  /** Where the marks of a source are kept; undefined: nowhere. */
  marks(source: string, assetsUrl: string | URL | undefined): MarkHost | undefined;
}

/** What may end a tab for lack of memory once a model is loaded. */
const GENERATIONS: ReadonlySet<Method> = new Set<Method>(["chat", "completion", "logits"]);

/** Failures of a place: it was not reached, or gave something else than the file, as a portal's sign-in page is. */
const ELSEWHERE: ReadonlySet<ErrorCode> = new Set<ErrorCode>([
  "network",
  "http_status",
  "not_a_model",
  "integrity",
]);

/** The loads of a host. */
export function makeLoad(host: LoadHost): (source: ModelSource, options?: LoadOptions) => Promise<Engine> {
  return async (source, options = {}) => {
    checkOptions(options);
    const { signal } = options;
    const places = resolveSource(source, options.mirrors);
    throwIfAborted(signal);
    const begun = performance.now();
    const plan = choose(options, host.platform());
    if (options.cache !== "none") keepStorage();
    const name = nameOf(places);
    const marks = name === null ? undefined : host.marks(name, options.assetsUrl);
    const past = marks === undefined || marks.isEmpty() ? NO_PAST : await lookBack(marks, signal);
    throwIfAborted(signal);
    const full = { threads: plan.threads, contextLength: options.contextLength ?? DEFAULT_CONTEXT };
    const config = stepDown(full, past.history?.steps ?? 0, {
      threads: typeof options.threads === "number",
      contextLength: options.contextLength !== undefined,
    });
    const marker = marks && new Marker(marks, { config, history: past.history });

    const memory: EngineInfo["memory"] = {
      wasmBytes: 0,
      weightsBytes: 0,
      kvBytes: 0,
      responseBytes: 0,
      tokenizerBytes: 0,
    };
    const onNotice = (notice: Notice) => tell(options.onNotice?.bind(options), notice);
    plan.notices.forEach(onNotice);
    if (marks !== undefined) noticesOf(past, { source: marks.source, full, config }).forEach(onNotice);
    marker?.enter("start");
    try {
      const link = await startSteppingDown({ ...plan, threads: config.threads }, host, {
        assetsUrl: options.assetsUrl,
        signal,
        onMemory: (update) => Object.assign(memory, update),
        onNotice,
        onMetrics: (metrics) => tell(options.onMetrics?.bind(options), metrics),
        onBegin: (method) => {
          if (GENERATIONS.has(method)) marker?.enter("generation");
        },
        onEnd: (method, answered) => {
          if (!GENERATIONS.has(method)) return;
          if (answered) marker?.answered();
          marker?.leave();
        },
      });
      const start = performance.now() - begun;
      try {
        const contextLimit = config.contextLength < full.contextLength ? config.contextLength : undefined;
        const onPhase = (phase: Progress["phase"]) => marker?.tell(phase);
        const info = await loadFirst(link, places, { ...options, contextLimit, onPhase });
        Object.assign(memory, info.memory);
        const runtime = { ...info.runtime, isolated: host.platform().isolated };
        const ms = { ...info.load?.ms, start, total: performance.now() - begun };
        return makeEngine(link, { ...info, runtime, memory, load: { ...info.load, ms } });
      } catch (error) {
        // The worker may still be writing what it fetched: it is asked to close, the caller need not wait for it.
        void link.close();
        throw error;
      }
    } finally {
      marker?.leave();
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
  marks: markHost,
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

/** How places are tried. */
interface LoadFirstOptions extends LoadOptions {
  /** Tokens of context that the caller did not ask for and shall not get more of. */
  contextLimit: number | undefined;
  onPhase(phase: Progress["phase"]): void;
}

/** Tries each place while it is the place that fails, not the model. */
async function loadFirst(
  { client }: Link,
  places: WireSource[],
  { contextLimit, onPhase, ...options }: LoadFirstOptions,
): Promise<EngineInfo> {
  let reached = 0;
  const onProgress = (progress: Progress) => {
    onPhase(progress.phase);
    reached = Math.min(1, Math.max(reached, progress.fraction));
    tell(options.onProgress?.bind(options), { ...progress, fraction: reached });
  };
  const loadWith = (source: WireSource, contextLength: number | undefined) =>
    client.request(
      "load",
      { source, options: wireOptions({ ...options, contextLength }) },
      {
        signal: options.signal,
        onEvent: (event) => {
          if (event.type === "progress") onProgress(event.progress);
        },
      },
    );
  const load = async (source: WireSource) => {
    if (contextLimit === undefined) return loadWith(source, options.contextLength);
    try {
      return await loadWith(source, contextLimit);
    } catch (error) {
      // A model that was made for less refuses that much: then its own context is below the limit.
      if (!(error instanceof QandleError) || error.code !== "invalid_request") throw error;
      return loadWith(source, undefined);
    }
  };
  let last: QandleError = failure("invalid_request", "there is no place to load from");
  for (const source of places) {
    try {
      return await load(source);
    } catch (error) {
      if (!(error instanceof QandleError) || !ELSEWHERE.has(error.code)) throw error;
      last = error;
    }
  }
  throw last;
}

/** Asks the browser not to clear what is kept; workers cannot. Some browsers ask the user, so nobody waits for it. */
function keepStorage(): void {
  globalThis.navigator?.storage?.persist?.().catch(() => {});
}

/** Calls back; what the callback throws is reported as from an event listener and does not break the load. */
function tell<T>(callback: ((value: T) => void) | undefined, value: T): void {
  try {
    callback?.(value);
  } catch (thrown) {
    reportError(thrown);
  }
}
