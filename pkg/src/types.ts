// The public types: sources, options, the engine, requests and replies. Requests and replies have OpenAI's shapes and
// spelling; what is this package's own is camelCase, or stands under `qandle`. One file, though a long one: it is the contract,
// and who reads it looks in one place.

import type { ErrorCode } from "./errors.js";

export type { ErrorCode };

/** The instruction set that a build of the engine uses. */
export type Tier = "simd128" | "relaxed";

/** Where downloaded weights are kept; `auto`: in an origin-private file, else in IndexedDB, else in the Cache API. */
export type CacheKind = "auto" | "cache-api" | "indexeddb" | "none";

/**
 * Where a model comes from: a URL (absolute, or relative to the page), `hf:owner/repo/path[@revision]`,
 * `ms:owner/repo/path[@revision]`, a `File` or `Blob`, shards, or a Hugging Face triple.
 */
export type ModelSource =
  | string
  | Blob
  | Blob[]
  | {
      /** One URL, or the shards of one model in any order. */
      url: string | string[];
      /** Hash of the whole file, 64 hexadecimal digits; other bytes are refused with `integrity`. */
      sha256?: string;
    }
  | {
      config: ModelSource;
      tokenizer: ModelSource;
      /**
       * `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json`. Left out, they are looked for beside a
       * URL that ends in `tokenizer.json` or `config.json`, and may be missing there.
       */
      tokenizerConfig?: ModelSource;
      chatTemplate?: ModelSource;
      generationConfig?: ModelSource;
      weights: ModelSource | ModelSource[];
      /** How float weights are kept. Default `none`. */
      quantize?: "none" | "q8_0" | "q4_0";
    };

/** How far a load is. */
export interface Progress {
  phase: "plan" | "download" | "verify" | "load" | "warmup";
  /** Bytes of this phase that are done. */
  loaded: number;
  /** Bytes of this phase, or null where nobody said. */
  total: number | null;
  /** 0..1 over all phases; never goes back. */
  fraction: number;
  /** Where the bytes come from. */
  source: "network" | "cache" | "image" | "file";
  bytesPerSecond: number | null;
  etaSeconds: number | null;
}

/**
 * Something the user may want to know; nothing failed. `tab_was_killed`: the system or the browser ended an earlier tab while
 * this source loaded or answered (`detail`: `phase`, `at`, `source`, `inARow`). `stepped_down`: fewer threads or a shorter
 * context than usual are used (`detail`: `threads`, `contextLength`, `cause`).
 */
export interface Notice {
  code: "quota" | "no_storage" | "tab_was_killed" | "stepped_down" | "repaired" | "not_isolated";
  message: string;
  detail?: Record<string, unknown>;
}

/** Upper bounds; each has a default that fits the device. */
export interface Limits {
  /** Sessions kept in memory. Default 10. */
  maxSessions?: number;
  /** Seconds without use after which a session leaves memory. Default 300. */
  sessionTtlSeconds?: number;
  /** Bytes of KV caches in memory; an answer that alone needs more takes it. Default 512 MiB. */
  kvBytes?: number;
  /**
   * Bytes of the engine's memory in use, weights and all caches together. Default: half of the device's memory where the
   * browser tells it, at least what the model with one whole context needs, at most 4 GiB. Where it is full, what is missed
   * least goes: work ahead, kept answers, token ids, conversations without a `session_id`, the warmed-up system prompt,
   * sessions that are on disk, other sessions, each the least recently used first. A request for which there is no room then
   * rejects with `out_of_memory`; nothing else ends with it. A model that does not fit with its context is `too_large`.
   */
  memoryBytes?: number;
  /** Bytes of the response cache. */
  responseBytes?: number;
  /** Bytes of all sessions on disk; the one used longest ago goes first. Default 1 GiB, 0 writes none. */
  diskBytes?: number;
  /** Tokens of one prompt; what `truncation` says of the context holds for it too. */
  maxInputTokens?: number;
  /** Requests that are computed together, each token of theirs in one pass; the others wait. Default 8, 1: one after another. */
  maxBatchSize?: number;
}

/** Options of {@link load}. */
export interface LoadOptions {
  /** Called with each step of the load; `fraction` never goes back. */
  onProgress?(p: Progress): void;
  /** Called with things worth telling, while loading and later. */
  onNotice?(n: Notice): void;
  /** Called after each chat or completion that was answered or aborted, with what it took: for a live panel, without asking. */
  onMetrics?(m: RequestMetrics): void;
  /** Aborts the load in any phase; the promise rejects with an `AbortError`. */
  signal?: AbortSignal;
  /**
   * Tokens of context. Default 4096, or the model's own when that is less; half of it, then a quarter, where more has ended
   * the tab on earlier visits. A number that is given here is taken in any case.
   */
  contextLength?: number;
  /**
   * Threads. `auto` (default): as many as decode fastest here, which the warm-up measures, of the cores and at most 8;
   * one where the page is not isolated, or where more have ended the tab on an earlier visit. A number is taken in any
   * case.
   */
  threads?: number | "auto";
  /** Instruction set. `auto` (default): relaxed SIMD where the browser has it. */
  tier?: Tier | "auto";
  /**
   * Where weights are kept. Default `auto`. With any but `none`, the token ids of texts that were asked are kept in
   * IndexedDB too, at most 1 MiB.
   */
  cache?: CacheKind;
  /** Keep a kernel-ready copy of the weights when there is room. Default true. */
  fastImage?: boolean;
  /**
   * Tokens of an attention window: a position sees the first 64 positions and the last `window` before it, rounded up to
   * whole pages of 64. The KV cache holds no more than these, and prompt and answer may be as long as the model was
   * made for, whatever `contextLength` says. Default none.
   */
  window?: number;
  /** Number type of the KV cache. Default `f16`. */
  kv?: "f16" | "f32" | "q8";
  /**
   * `true` (default): the kernels run once before the engine is ready, and then, while nobody asks anything, the session that
   * was used last comes back to memory. A string does that too and is the system prompt: it is prefilled after the load, so that
   * the first chat with it has it (`usage.prompt_tokens_details.cached_tokens`). Any request goes first. `false`: none of it.
   */
  warmup?: boolean | string;
  /**
   * Bring what users write in chats to one spelling before it is asked: NFC, no white space at either end, one space or line
   * break for a run of it. More questions are then answered by a kept answer. It changes the question (the indentation of
   * code goes), and the answer is that to the changed one. Default false.
   */
  normalize?: boolean;
  limits?: Limits;
  /**
   * Texts that are likely to come, such as a system prompt: they are tokenised with the load, so that the tokenizer's cache
   * has them. At most 256 texts of 256 KiB in all, else `invalid_request`. A model without a tokenizer needs none.
   */
  phrases?: string[];
  /**
   * Whether tokens are guessed from what stands in the text already and verified together. The answer is the same, token
   * for token; one that repeats its prompt comes faster. Default true.
   */
  speculation?: boolean;
  /** Hosts to ask for `hf:` and `ms:` sources, in order, in place of the hub's own. */
  mirrors?: Partial<Record<"hf" | "ms", string[]>>;
  /** Where `worker.js` and `wasm/` are, if not beside this module. May be on another origin that allows CORS. */
  assetsUrl?: string | URL;
}

/** What is loaded and how it runs. */
export interface EngineInfo {
  model: {
    name: string;
    architecture: string;
    parameters: number;
    quantization: string;
    /** The context the model was trained for, in tokens. */
    contextLength: number;
    vocabSize: number;
    /** Bytes of the model's tensors. */
    bytes: number;
    sha256: string | null;
    hasTokenizer: boolean;
    hasChatTemplate: boolean;
  };
  runtime: {
    tier: Tier;
    threads: number;
    /** Whether the page is cross-origin isolated, which threads need. */
    isolated: boolean;
    version: string;
  };
  /** The context of this engine, in tokens. */
  contextLength: number;
  /** Bytes in use; kept up to date. */
  memory: {
    wasmBytes: number;
    weightsBytes: number;
    kvBytes: number;
    responseBytes: number;
    tokenizerBytes: number;
  };
  /** How the weights came: from where, and where the time went. */
  load: {
    source: Progress["source"];
    /** Milliseconds by step: `start` is the worker with its wasm, `total` everything until `load` resolved. */
    ms: Record<string, number>;
  };
}

/** Options of every call. */
export interface CallOptions {
  /** Aborts the call. */
  signal?: AbortSignal;
}

/** A loaded model. Calls may run concurrently; they are served in order. */
export interface Engine {
  /** What is loaded; `memory` is live. */
  readonly info: EngineInfo;
  readonly chat: {
    completions: {
      /** A chat completion as a stream of chunks. Leaving the loop cancels the generation. */
      create(
        body: ChatRequest & { stream: true },
        options?: { signal?: AbortSignal },
      ): Promise<AsyncIterable<ChatChunk>>;
      /** A chat completion as one reply. */
      create(body: ChatRequest, options?: { signal?: AbortSignal }): Promise<ChatReply>;
    };
  };
  readonly completions: {
    /** A raw completion as a stream. A `prompt` of text gets a BOS where the model wants one; token ids are taken as they are. */
    create(
      body: CompletionRequest & { stream: true },
      options?: { signal?: AbortSignal },
    ): Promise<AsyncIterable<Completion>>;
    /** A raw completion as one reply. */
    create(body: CompletionRequest, options?: { signal?: AbortSignal }): Promise<Completion>;
  };
  /** Token ids of a text, without BOS. `special` (default false): match special tokens in the text. */
  tokenize(text: string, options?: CallOptions & { special?: boolean }): Promise<Uint32Array>;
  /** Text of token ids. `special` (default false): keep control tokens. */
  detokenize(ids: Uint32Array, options?: CallOptions & { special?: boolean }): Promise<string>;
  /** Tokens of a text, or of messages with the chat template around them. */
  countTokens(input: string | ChatMessage[], options?: CallOptions): Promise<number>;
  /** The text that the model's own template makes of messages. Further keys are the template's own variables. */
  applyChatTemplate(
    messages: ChatMessage[],
    options?: { tools?: unknown[]; addGenerationPrompt?: boolean; [kwarg: string]: unknown },
  ): Promise<string>;
  /** Logits after the last token, (V), or with `all` after each one, (T, V) row by row. */
  logits(ids: Uint32Array, options?: CallOptions & { all?: boolean }): Promise<Float32Array>;
  readonly sessions: {
    /** This model's sessions in memory and on disk, the last used first. */
    list(): Promise<SessionInfo[]>;
    get(id: string): Promise<SessionInfo | null>;
    /** A second session with the same history; costs no copy. */
    fork(id: string, as: string): Promise<SessionInfo>;
    /** Writes a session to disk now; without it that happens as soon as nobody asks anything. */
    save(id: string): Promise<void>;
    delete(id: string): Promise<void>;
    clear(): Promise<void>;
  };
  readonly responses: { stats(): Promise<CacheStats>; clear(): Promise<void> };
  /** Timings, hit rates and memory of the last 100 requests. */
  metrics(): Promise<Metrics>;
  /** Where a token's time goes, by kernel. */
  profile(): Promise<Profile>;
  /** Whether this model would load without a network. */
  offlineReady(): Promise<{ ready: boolean; missing: string[] }>;
  /** Ends the worker. What is pending rejects with `closed`. May be called twice. */
  close(): Promise<void>;
}

/** One conversation's history and KV cache. */
export interface SessionInfo {
  id: string;
  tokens: number;
  bytes: number;
  where: "memory" | "disk" | "both";
  /** Milliseconds since 1970. */
  createdAt: number;
  /** Milliseconds since 1970. */
  usedAt: number;
}

export interface CacheStats {
  hits: number;
  misses: number;
  /** Hits by look-ups, 0..1; 0 before the first look-up. */
  hitRate: number;
  entries: number;
  bytes: number;
}

/**
 * The tokenizer's cache. What is looked up are the parts of a text between special tokens.
 */
export interface TokenizerCacheStats extends CacheStats {
  /** Of all look-ups, those that either level answered. */
  combinedHitRate: number;
  /** Tokens that all look-ups came to, and those of them that either level gave. */
  tokens: number;
  reusedTokens: number;
  /** The second level, which goes from visit to visit; it is asked for what the first one misses. `bytes` are those in memory. */
  disk: CacheStats;
}

/** Sessions. A hit is a prompt of which some was there, whichever session it was taken from; hits are those of the window. */
export interface SessionCacheStats extends CacheStats {
  reusedTokens: number;
  promptTokens: number;
  /** Sessions that requests named and memory had not, since the load: those that came back from the disk, and the others. */
  disk: { hits: number; misses: number; hitRate: number };
}

/** A summary of measured values. */
export interface Series {
  count: number;
  avg: number;
  min: number;
  max: number;
  p50: number;
  p95: number;
}

/** The last 100 requests; milliseconds and tokens per second. */
export interface Metrics {
  requests: number;
  ttftMs: Series;
  totalMs: Series;
  prefillTokensPerSecond: Series;
  decodeTokensPerSecond: Series;
  phasesMs: { queue: Series; tokenize: Series; prefill: Series; decode: Series; detokenize: Series };
  caches: {
    session: SessionCacheStats;
    response: CacheStats;
    tokenizer: TokenizerCacheStats;
  };
  memory: EngineInfo["memory"];
}

/** What one request took; milliseconds and tokens per second. Of a kept answer nothing was prefilled or decoded. */
export interface RequestMetrics {
  sessionId: string | null;
  /** Whether the answer was a kept one. */
  cached: boolean;
  promptTokens: number;
  /** Of the prompt, what needed no prefill. */
  reusedTokens: number;
  completionTokens: number;
  ttftMs: number;
  totalMs: number;
  prefillTokensPerSecond: number;
  decodeTokensPerSecond: number;
  phasesMs: { queue: number; tokenize: number; prefill: number; decode: number; detokenize: number };
  /** Of each cache after the request, 0..1; as in {@link Metrics}. */
  hitRates: {
    session: number;
    sessionDisk: number;
    response: number;
    tokenizer: number;
    tokenizerDisk: number;
  };
  memory: EngineInfo["memory"];
}

/** Time by kernel. */
export interface Profile {
  tokens: number;
  wallMs: number;
  outsideKernelsMs: number;
  kernels: { name: string; calls: number; ms: number; bytes: number; ops: number }[];
}

/** One message of a conversation. */
export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content: string | null;
  /** A reasoning model's thoughts, apart from its answer. */
  reasoning_content?: string;
  tool_calls?: unknown[];
  tool_call_id?: string;
  name?: string;
}

/** How tokens are chosen. */
export interface Sampling {
  /** 0 is greedy. */
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  seed?: number;
  /** Up to 16 texts that end the answer; not part of it. */
  stop?: string | string[];
  /** Token id → value added to its logit. */
  logit_bias?: Record<string, number>;
  max_tokens?: number;
  max_completion_tokens?: number;
}

/** Body of `chat.completions.create`. */
export interface ChatRequest extends Sampling {
  messages: ChatMessage[];
  model?: string;
  stream?: boolean;
  stream_options?: { include_usage?: boolean };
  /** Conversation whose KV cache is to be used and kept. */
  session_id?: string;
  /**
   * Kept answers: use them (`auto`, the default), or answer anew and keep that (`refresh`); both also share beginnings, such as
   * a system prompt, between sessions. `off` takes nothing from other requests and leaves nothing to them; only its own session goes on.
   */
  cache?: "auto" | "off" | "refresh";
  /**
   * A chat that is longer than the context: `auto` (default) leaves out whole oldest turns, never the system prompt or the last
   * question, and says in `qandle.dropped_messages` how many messages that were; `disabled` rejects with `context_overflow`.
   */
  truncation?: "auto" | "disabled";
  return_tokens?: boolean;
  tools?: unknown[];
  tool_choice?: unknown;
  response_format?: unknown;
  logprobs?: boolean;
  top_logprobs?: number;
  n?: number;
  /** Variables for the model's own template. */
  chat_template_kwargs?: Record<string, unknown>;
}

/** Body of `completions.create`. */
export interface CompletionRequest extends Sampling {
  prompt: string | ArrayLike<number>;
  model?: string;
  stream?: boolean;
  session_id?: string;
  cache?: "auto" | "off" | "refresh";
  return_tokens?: boolean;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
  /** Tokens that were guessed and verified together, see `speculation`. */
  completion_tokens_details: { accepted_prediction_tokens: number; rejected_prediction_tokens: number };
}

/** On the whole reply, and on the last chunk of a stream. */
export interface Extra {
  session_id: string | null;
  cached: boolean;
  /** Share of the prompt that needed no prefill, 0..1. */
  cached_ratio: number;
  /** Messages that no longer fitted into the context and are not in the prompt: the oldest behind the system prompt. */
  dropped_messages: number;
  timings: {
    queue_ms: number;
    tokenize_ms: number;
    prefill_ms: number;
    ttft_ms: number;
    decode_ms: number;
    total_ms: number;
    prefill_tokens_per_second: number;
    decode_tokens_per_second: number;
  };
}

/** Why an answer ended. */
export type FinishReason = "stop" | "length" | "tool_calls" | "abort";

/** A whole chat completion. */
export interface ChatReply {
  id: string;
  object: "chat.completion";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: { index: number; message: ChatMessage; finish_reason: FinishReason; token_ids?: number[] }[];
  usage: Usage;
  qandle: Extra;
}

/** A piece of a streamed chat completion. */
export interface ChatChunk {
  id: string;
  object: "chat.completion.chunk";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: {
    index: number;
    delta: Partial<ChatMessage>;
    finish_reason: FinishReason | null;
    token_ids?: number[];
  }[];
  usage?: Usage;
  qandle?: Extra;
}

/** A raw completion; in a stream each piece has this shape with the new text only. */
export interface Completion {
  id: string;
  object: "text_completion";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: { index: number; text: string; finish_reason: FinishReason | null; token_ids?: number[] }[];
  usage?: Usage;
  qandle?: Extra;
}

/** What a model would need, before any weights are fetched. */
export interface Estimate {
  name: string;
  parameters: number;
  quantization: string;
  downloadBytes: number;
  peakBytes: number;
  contextLength: number;
  fits: boolean;
  reason?: string;
  proposal?: { contextLength?: number };
  diskFreeBytes: number | null;
}

/** A model that is kept in this browser. */
export interface StoredModel {
  source: string;
  name: string;
  bytes: number;
  storedBytes: number;
  complete: boolean;
  imageBytes: number;
  /** Milliseconds since 1970. */
  usedAt: number;
}

/** What is kept on disk, and questions about a model that is not loaded. */
export interface Models {
  list(): Promise<StoredModel[]>;
  /** Reads a model's header alone and makes the plan. */
  estimate(s: ModelSource, options?: { contextLength?: number; signal?: AbortSignal }): Promise<Estimate>;
  has(s: ModelSource): Promise<boolean>;
  verify(s: ModelSource): Promise<{ chunks: number; bad: number; repaired: number }>;
  delete(s: ModelSource): Promise<void>;
  /**
   * Keeps a GGUF file of the device as if it had been downloaded: loads of `as` (a URL, or a hub's `hf:` or `ms:` name) then
   * find it.
   */
  import(file: Blob, as: string): Promise<void>;
  /**
   * Deletes models, least recently used first, until the site may store `bytes` more; nothing is ever deleted unasked.
   * Resolves to the sources that went.
   */
  makeRoom(bytes: number): Promise<string[]>;
  storage(): Promise<{ usedBytes: number; quotaBytes: number; persisted: boolean }>;
}
