// The page's half of the protocol: requests with ids over one endpoint, events, cancel, streams. Knows nothing of
// workers, locks or wasm (spawn.ts), nor of what the methods mean (engine.ts).

import { abortError, errorFromWire, failure, messageOf, type QandleError } from "./errors.js";
import type {
  Endpoint,
  Method,
  Params,
  RequestEvent,
  RequestReply,
  Result,
  ToPage,
  WorkerState,
} from "./protocol.js";
import { ChunkStream } from "./stream.js";
import type { ChatChunk, Completion, EngineInfo, Notice, RequestMetrics } from "./types.js";

/** What the client tells its owner, beside the answers. */
export interface ClientHooks {
  /** Bytes in use, with any message that carries them. */
  onMemory?(memory: EngineInfo["memory"]): void;
  onNotice?(notice: Notice): void;
  onMetrics?(metrics: RequestMetrics): void;
  /** A request is under way. */
  onBegin?(method: Method): void;
  /** It is no longer, whatever became of it; `answered`: the worker has done it. */
  onEnd?(method: Method, answered: boolean): void;
  /** The worker speaks of itself. */
  onState?(state: WorkerState): void;
}

/** Options of one request. */
export interface RequestOptions {
  signal?: AbortSignal;
  onEvent?(event: RequestEvent): void;
}

interface Pending {
  event(event: RequestEvent): void;
  done(result: unknown): void;
  error(error: QandleError | DOMException): void;
}

type Chunk = { chat: ChatChunk; completion: Completion };

/** Speaks the protocol over an endpoint. */
export class Client {
  readonly #endpoint: Endpoint;
  readonly #hooks: ClientHooks;
  readonly #pending = new Map<number, Pending>();
  #nextId = 1;
  #ended: QandleError | null = null;

  constructor(endpoint: Endpoint, hooks: ClientHooks = {}) {
    this.#endpoint = endpoint;
    this.#hooks = hooks;
    endpoint.addEventListener("message", (event) => this.#receive(event.data));
  }

  /** One answer. An abort sends `cancel` and rejects at once. */
  request<M extends Method>(
    method: M,
    params: Params<M>,
    { signal, onEvent }: RequestOptions = {},
  ): Promise<Result<M>> {
    return new Promise((resolve, reject) => {
      if (!this.#open(signal, reject)) return;
      const id = this.#nextId++;
      const settle = (answered: boolean) => {
        signal?.removeEventListener("abort", onAbort);
        this.#finish(id, method, answered);
      };
      const onAbort = () => {
        settle(false);
        this.#cancel(id);
        reject(abortError());
      };
      this.#begin(id, method, {
        event: (event) => onEvent?.(event),
        done: (result) => {
          settle(true);
          resolve(result as Result<M>);
        },
        error: (error) => {
          settle(false);
          reject(error);
        },
      });
      signal?.addEventListener("abort", onAbort, { once: true });
      this.#post(id, method, params);
    });
  }

  /**
   * Chunks of a generation. Resolves with the first chunk, so what is refused or aborted before it rejects here.
   * An abort after the first chunk ends the stream with what the worker says last.
   */
  stream<M extends keyof Chunk>(
    method: M,
    params: Params<M>,
    { signal }: Pick<RequestOptions, "signal"> = {},
  ): Promise<AsyncIterable<Chunk[M]>> {
    return new Promise((resolve, reject) => {
      if (!this.#open(signal, reject)) return;
      const id = this.#nextId++;
      let started = false;
      let answered = false;
      const release = () => {
        signal?.removeEventListener("abort", onAbort);
        this.#finish(id, method, answered);
      };
      const stream = new ChunkStream<Chunk[M]>({ cancel: () => this.#cancel(id), release });
      const onAbort = () => {
        if (started) return stream.abort();
        release();
        this.#cancel(id);
        reject(abortError());
      };
      const start = () => {
        started = true;
        resolve(stream);
      };
      this.#begin(id, method, {
        event: (event) => {
          if (event.type !== "chunks") return;
          start();
          for (const chunk of JSON.parse(event.chunks) as Chunk[M][]) stream.push(chunk);
        },
        done: () => {
          answered = true;
          start();
          stream.end();
        },
        error: (error) => {
          if (started) return stream.fail(error);
          release();
          reject(error);
        },
      });
      signal?.addEventListener("abort", onAbort, { once: true });
      this.#post(id, method, params);
    });
  }

  /** Rejects what is pending and all that comes later. The first call counts. */
  end(error: QandleError): void {
    if (this.#ended !== null) return;
    this.#ended = error;
    for (const entry of [...this.#pending.values()]) entry.error(error);
  }

  /** As {@link end}, then asks the worker to close and waits for its answer, at most `graceMs`. */
  async close(error: QandleError, graceMs: number): Promise<void> {
    if (this.#ended !== null) return;
    this.end(error);
    const id = this.#nextId++;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, graceMs);
      const settle = () => {
        clearTimeout(timer);
        resolve();
      };
      this.#pending.set(id, { event: () => {}, done: settle, error: settle });
      this.#post(id, "close", {});
    });
    this.#pending.delete(id);
  }

  /** Whether a request may be sent; else it has been rejected. */
  #open(signal: AbortSignal | undefined, reject: (error: unknown) => void): boolean {
    if (this.#ended !== null) reject(this.#ended);
    else if (signal?.aborted) reject(abortError());
    else return true;
    return false;
  }

  #begin(id: number, method: Method, entry: Pending): void {
    this.#pending.set(id, entry);
    this.#hooks.onBegin?.(method);
  }

  #finish(id: number, method: Method, answered: boolean): void {
    if (this.#pending.delete(id)) this.#hooks.onEnd?.(method, answered);
  }

  #post<M extends Method>(id: number, method: M, params: Params<M>): void {
    try {
      this.#endpoint.postMessage({ type: "request", id, method, params });
    } catch (thrown) {
      // Functions, symbols and the like cannot be cloned: the caller's body is wrong, the worker is well.
      const message = `the parameters of ${method} cannot be sent to the worker: ${messageOf(thrown)}`;
      this.#pending.get(id)?.error(failure("invalid_request", message, { cause: thrown }));
    }
  }

  #cancel(id: number): void {
    this.#endpoint.postMessage({ type: "cancel", id });
  }

  #receive(data: unknown): void {
    if (!isMessage(data)) return;
    switch (data.type) {
      case "event":
      case "done":
      case "error":
        return this.#answer(data);
      case "locked":
      case "threads":
      case "keeper":
      case "ready":
      case "fatal":
        return this.#hooks.onState?.(data);
      default:
        data satisfies never;
    }
  }

  #answer(reply: RequestReply): void {
    if (reply.memory != null) this.#hooks.onMemory?.(reply.memory);
    if (reply.type === "event" && reply.event.type === "notice") this.#hooks.onNotice?.(reply.event.notice);
    if (reply.type === "event" && reply.event.type === "metrics")
      this.#hooks.onMetrics?.(reply.event.metrics);
    // Unknown ids are requests that were aborted or left: their last messages are still on the way.
    const entry = this.#pending.get(reply.id);
    if (entry === undefined) return;
    switch (reply.type) {
      case "event":
        return entry.event(reply.event);
      case "done":
        return entry.done(reply.result);
      case "error":
        return entry.error(errorFromWire(reply.error));
      default:
        reply satisfies never;
    }
  }
}

function isMessage(data: unknown): data is ToPage {
  return typeof data === "object" && data !== null && "type" in data && typeof data.type === "string";
}
