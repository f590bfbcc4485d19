// The worker's half of the protocol over a MessageChannel, played by a test: it sees what the page posted and answers
// what the test says.

import { EventEmitter, once } from "node:events";
import type { RequestEvent } from "../src/protocol.js";
import type { WorkerLike } from "../src/spawn.js";
import type { ChatChunk, EngineInfo, RequestMetrics } from "../src/types.js";

/** A posted message, read loosely. */
export interface Posted {
  type: string;
  id: number;
  method?: string;
  params?: unknown;
  threads?: number;
  tier?: string;
  lockName?: string;
}

/** A worker whose messages cross a real channel, so that they are cloned and arrive later. */
export class FakeWorker {
  readonly posted: Posted[] = [];
  terminated = false;
  /** As a message that was under way when the page ended the worker. */
  talksAfterItsEnd = false;
  readonly #channel = new MessageChannel();
  readonly #arrivals = new EventEmitter();
  readonly #listeners: ((event: { message?: string }) => void)[] = [];

  constructor() {
    this.#channel.port2.onmessage = ({ data }) => {
      this.posted.push(data);
      this.#arrivals.emit("message");
    };
  }

  /** What the page holds. */
  get page(): WorkerLike {
    const { port1 } = this.#channel;
    return {
      postMessage: (message, transfer) => port1.postMessage(message, transfer ?? []),
      addEventListener: (type: string, listener: (event: { data: unknown; message?: string }) => void) => {
        if (type === "error") this.#listeners.push((event) => listener({ data: undefined, ...event }));
        else if (type === "message") port1.onmessage = listener;
      },
      terminate: () => {
        this.terminated = true;
        if (!this.talksAfterItsEnd) this.close();
      },
    };
  }

  /** The first message that fits, now or later. */
  async take(fits: (message: Posted) => boolean): Promise<Posted> {
    for (;;) {
      const found = this.posted.find(fits);
      if (found !== undefined) return found;
      await once(this.#arrivals, "message");
    }
  }

  request(method: string, nth = 0): Promise<Posted> {
    return this.take((message) => this.#calls(method).indexOf(message) === nth);
  }

  cancelled(id: number): Promise<Posted> {
    return this.take((message) => message.type === "cancel" && message.id === id);
  }

  #calls(method: string): Posted[] {
    return this.posted.filter((message) => message.type === "request" && message.method === method);
  }

  say(message: unknown, transfer: MessagePort[] = []): void {
    this.#channel.port2.postMessage(message, transfer as never);
  }

  event(id: number, event: RequestEvent): void {
    this.say({ type: "event", id, event });
  }

  chunk(id: number, content: string): void {
    this.event(id, { type: "chunks", chunks: JSON.stringify([chunk(content)]) });
  }

  done(id: number, result: unknown = null): void {
    this.say({ type: "done", id, result });
  }

  error(id: number, code: string, message = code): void {
    this.say({ type: "error", id, error: { code, message } });
  }

  /** An `error` event on the Worker object. */
  crash(message?: string): void {
    for (const listener of this.#listeners) listener({ message });
  }

  close(): void {
    this.#channel.port1.close();
  }
}

export function chunk(content: string, finish_reason: "stop" | "abort" | null = null): ChatChunk {
  return {
    id: "c",
    object: "chat.completion.chunk",
    created: 1,
    model: "m",
    choices: [{ index: 0, delta: { content }, finish_reason }],
  };
}

export const INFO: EngineInfo = {
  model: {
    name: "tiny",
    architecture: "qwen2",
    parameters: 10,
    quantization: "Q4_K_M",
    contextLength: 128,
    vocabSize: 300,
    bytes: 40,
    sha256: null,
    hasTokenizer: true,
    hasChatTemplate: true,
  },
  runtime: { tier: "simd128", threads: 1, isolated: false, version: "0.1.0" },
  contextLength: 128,
  load: { source: "network", ms: { total: 1 } },
  memory: { wasmBytes: 1, weightsBytes: 1, kvBytes: 1, responseBytes: 1, tokenizerBytes: 1 },
};

export const RECORD: RequestMetrics = {
  sessionId: "s",
  cached: false,
  promptTokens: 10,
  reusedTokens: 5,
  completionTokens: 3,
  ttftMs: 2,
  totalMs: 4,
  prefillTokensPerSecond: 100,
  decodeTokensPerSecond: 50,
  phasesMs: { queue: 0, tokenize: 0, prefill: 2, decode: 2, detokenize: 0 },
  hitRates: { session: 1, sessionDisk: 0, response: 0, tokenizer: 1, tokenizerDisk: 0 },
  memory: INFO.memory,
};

/** The texts of a stream, to its end. */
export async function texts(stream: AsyncIterable<ChatChunk>): Promise<string[]> {
  const found: string[] = [];
  for await (const { choices } of stream) found.push(choices[0]?.delta.content ?? "");
  return found;
}

/** Whether a promise is still open after everything that was posted has arrived. */
export async function isOpen(promise: Promise<unknown>): Promise<boolean> {
  const open = Symbol("open");
  const later = new Promise((resolve) => setTimeout(resolve, 20, open));
  return (await Promise.race([promise.catch(() => {}), later])) === open;
}
