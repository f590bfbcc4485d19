// The public `Engine` over a link to its worker: each call is one request. Checks only what could not cross the border
// as it is; the worker checks the rest and names the field.

import { failure } from "./errors.js";
import type { Link } from "./spawn.js";
import type {
  CallOptions,
  ChatChunk,
  ChatReply,
  ChatRequest,
  Completion,
  CompletionRequest,
  Engine,
  EngineInfo,
} from "./types.js";
import { offlineReady } from "./unavailable.js";

/** An engine over a worker that has loaded the model of `info`. The caller keeps `info.memory` up to date. */
export function makeEngine({ client, close }: Link, info: EngineInfo): Engine {
  function createChat(
    body: ChatRequest & { stream: true },
    options?: CallOptions,
  ): Promise<AsyncIterable<ChatChunk>>;
  function createChat(body: ChatRequest, options?: CallOptions): Promise<ChatReply>;
  async function createChat(
    body: ChatRequest,
    options?: CallOptions | null,
  ): Promise<AsyncIterable<ChatChunk> | ChatReply> {
    checkBody(body);
    const signal = signalOf(options);
    if (body.stream) return client.stream("chat", { body }, { signal });
    return whole(await client.request("chat", { body }, { signal }));
  }

  function createCompletion(
    body: CompletionRequest & { stream: true },
    options?: CallOptions,
  ): Promise<AsyncIterable<Completion>>;
  function createCompletion(body: CompletionRequest, options?: CallOptions): Promise<Completion>;
  async function createCompletion(
    body: CompletionRequest,
    options?: CallOptions | null,
  ): Promise<AsyncIterable<Completion> | Completion> {
    checkBody(body);
    const signal = signalOf(options);
    const { prompt } = body;
    const params = {
      body: typeof prompt === "string" ? body : { ...body, prompt: Array.from(tokenIds(prompt, "prompt")) },
    };
    if (body.stream) return client.stream("completion", params, { signal });
    return whole(await client.request("completion", params, { signal }));
  }

  return {
    info,
    chat: { completions: { create: createChat } },
    completions: { create: createCompletion },
    tokenize: async (text, options) => {
      const params = { text: checkText(text, "text"), special: options?.special ?? false };
      return client.request("tokenize", params, { signal: signalOf(options) });
    },
    detokenize: async (ids, options) => {
      const params = { ids: tokenIds(ids, "ids"), special: options?.special ?? false };
      return client.request("detokenize", params, { signal: signalOf(options) });
    },
    countTokens: async (input, options) =>
      client.request("countTokens", { input }, { signal: signalOf(options) }),
    applyChatTemplate: (messages, options = {}) => client.request("applyChatTemplate", { messages, options }),
    logits: async (ids, options) => {
      const params = { ids: tokenIds(ids, "ids"), all: options?.all ?? false };
      return client.request("logits", params, { signal: signalOf(options) });
    },
    sessions: {
      list: () => client.request("sessions.list", {}),
      get: (id) => client.request("sessions.get", { id }),
      fork: (id, as) => client.request("sessions.fork", { id, as }),
      save: async (id) => {
        await client.request("sessions.save", { id });
      },
      delete: async (id) => {
        await client.request("sessions.delete", { id });
      },
      clear: async () => {
        await client.request("sessions.clear", {});
      },
    },
    responses: {
      stats: () => client.request("responses.stats", {}),
      clear: async () => {
        await client.request("responses.clear", {});
      },
    },
    metrics: () => client.request("metrics", {}),
    profile: () => client.request("profile", {}),
    offlineReady,
    close,
  };
}

function whole<R>(reply: R | null): R {
  if (reply === null) throw failure("worker_died", "the worker answered without a reply");
  return reply;
}

function checkBody(body: object): void {
  if (typeof body !== "object" || body === null || Array.isArray(body)) {
    throw failure("invalid_request", "the request's body must be an object");
  }
  for (const [field, value] of Object.entries(body)) {
    // The worker reads JSON, where these would silently become null: the default.
    if (typeof value === "number" && !Number.isFinite(value)) {
      throw failure("invalid_request", `${field} must be a finite number; found ${value}`, {
        detail: { field },
      });
    }
  }
}

/** The signal among a call's options. Options and signal may be null, as in `fetch`. */
function signalOf(options: CallOptions | null | undefined): AbortSignal | undefined {
  const signal: unknown = options?.signal ?? undefined;
  if (signal === undefined || signal instanceof AbortSignal) return signal;
  throw failure("invalid_request", "signal must be an AbortSignal", { detail: { field: "signal" } });
}

function checkText(text: unknown, field: string): string {
  if (typeof text === "string") return text;
  throw failure("invalid_request", `${field} must be a string; found ${typeof text}`, { detail: { field } });
}

/** A copy of token ids that can be sent, each checked: a typed array would wrap a wrong one silently. */
function tokenIds(ids: ArrayLike<number>, field: string): Uint32Array {
  if (typeof ids !== "object" || ids === null || typeof ids.length !== "number") {
    throw failure("invalid_request", `${field} must be a list of token ids`, { detail: { field } });
  }
  return Uint32Array.from(ids, (id, index) => {
    if (Number.isInteger(id) && id >= 0 && id <= 0xffffffff) return id;
    throw failure("invalid_request", `${field}[${index}] must be a token id; found ${String(id)}`, {
      detail: { field, index },
    });
  });
}
