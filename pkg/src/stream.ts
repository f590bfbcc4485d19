// A queue of chunks that is read with `for await`. Owns the states of a stream: open, aborted (waiting for the
// worker's last chunk), ended. Leaving the loop cancels.

/** What a stream asks of its request. */
export interface StreamRequest {
  /** Tells the worker to stop. */
  cancel(): void;
  /** The stream listens no longer. */
  release(): void;
}

/** What a stream looks at in a chunk. */
interface AnyChunk {
  choices: { finish_reason: unknown }[];
  usage?: unknown;
}

/** How long an aborted stream waits for the worker's last chunk, in ms. A token takes less. */
export const ABORT_GRACE_MS = 1000;

/** Chunks in the order in which they came. */
export class ChunkStream<C extends AnyChunk> implements AsyncIterableIterator<C, undefined> {
  readonly #request: StreamRequest;
  #queue: C[] = [];
  #waiting: { resolve(step: IteratorResult<C, undefined>): void; reject(error: unknown): void }[] = [];
  #state: "open" | "aborted" | "ended" = "open";
  #error: { value: unknown } | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(request: StreamRequest) {
    this.#request = request;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  next(): Promise<IteratorResult<C, undefined>> {
    const chunk = this.#queue.shift();
    if (chunk !== undefined) return Promise.resolve({ done: false, value: chunk });
    if (this.#error !== null) {
      const { value } = this.#error;
      this.#error = null; // An iterator throws once, then it is done.
      return Promise.reject(value);
    }
    if (this.#state === "ended") return Promise.resolve({ done: true, value: undefined });
    return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
  }

  /** The loop was left: cancel, forget what was not read. */
  return(): Promise<IteratorResult<C, undefined>> {
    if (this.#state === "open") this.#request.cancel();
    this.#queue = [];
    this.#error = null;
    this.end();
    return Promise.resolve({ done: true, value: undefined });
  }

  push(chunk: C): void {
    if (this.#state === "ended") return;
    if (this.#state === "aborted" && !isLast(chunk)) return;
    const waiter = this.#waiting.shift();
    if (waiter !== undefined) waiter.resolve({ done: false, value: chunk });
    else this.#queue.push(chunk);
  }

  /** Stops the text at once; only the worker's last chunk (finish_reason, usage) is still let through. */
  abort(): void {
    if (this.#state !== "open") return;
    this.#state = "aborted";
    this.#queue = this.#queue.filter(isLast);
    this.#request.cancel();
    this.#timer = setTimeout(() => this.end(), ABORT_GRACE_MS);
  }

  end(): void {
    if (this.#state === "ended") return;
    this.#state = "ended";
    clearTimeout(this.#timer);
    this.#request.release();
    for (const waiter of this.#waiting.splice(0)) waiter.resolve({ done: true, value: undefined });
  }

  /** Ends with an error, after the chunks that came before it. An aborted stream just ends. */
  fail(error: unknown): void {
    if (this.#state === "open") {
      const waiter = this.#waiting.shift();
      if (waiter !== undefined) waiter.reject(error);
      else this.#error = { value: error };
    }
    this.end();
  }
}

function isLast(chunk: AnyChunk): boolean {
  return chunk.usage != null || chunk.choices.some((choice) => choice.finish_reason != null);
}
