// The public contract of the npm package "qandle": `dist/index.d.ts` must be assignable to it (see contract.test.ts).

export type Tier = "simd128" | "relaxed";                      // built files: qandle_{simd128,relaxed}{,_threads}.wasm
export type CacheKind = "auto" | "cache-api" | "indexeddb" | "none";
export type ModelSource =
  | string                                                     // URL, "hf:owner/repo/path[@rev]", "ms:owner/repo/path[@rev]"
  | Blob | Blob[]                                              // a File, or shards
  | { url: string | string[]; sha256?: string }
  | { config: ModelSource; tokenizer: ModelSource; weights: ModelSource | ModelSource[]; quantize?: "none" | "q8_0" | "q4_0" };

export interface Progress {                                    // fraction never goes back
  phase: "plan" | "download" | "verify" | "load" | "warmup";
  loaded: number; total: number | null; fraction: number;      // bytes of this phase; 0..1 over all phases
  source: "network" | "cache" | "image" | "file";
  bytesPerSecond: number | null; etaSeconds: number | null;
}
export interface Notice { code: "quota" | "no_storage" | "tab_was_killed" | "stepped_down" | "repaired" | "not_isolated"; message: string; detail?: Record<string, unknown> }
export interface Limits { maxSessions?: number; sessionTtlSeconds?: number; kvBytes?: number; responseBytes?: number; diskBytes?: number; maxInputTokens?: number }
export interface LoadOptions {
  onProgress?(p: Progress): void; onNotice?(n: Notice): void; signal?: AbortSignal;
  contextLength?: number;                                      // 4096
  threads?: number | "auto"; tier?: Tier | "auto"; cache?: CacheKind; fastImage?: boolean;
  kv?: "f16" | "f32" | "q8"; warmup?: boolean | string; limits?: Limits; mirrors?: Record<"hf" | "ms", string[]>; assetsUrl?: string | URL;
}
export function load(source: ModelSource, options?: LoadOptions): Promise<Engine>;

export interface EngineInfo {
  model: { name: string; architecture: string; parameters: number; quantization: string; contextLength: number; vocabSize: number; bytes: number; sha256: string | null; hasTokenizer: boolean; hasChatTemplate: boolean };
  runtime: { tier: Tier; threads: number; isolated: boolean; version: string };
  contextLength: number;
  memory: { wasmBytes: number; weightsBytes: number; kvBytes: number; responseBytes: number; tokenizerBytes: number };
}
export interface Engine {
  readonly info: EngineInfo;                                   // memory is live
  readonly chat: { completions: { create(body: ChatRequest & { stream: true }, o?: { signal?: AbortSignal }): Promise<AsyncIterable<ChatChunk>>; create(body: ChatRequest, o?: { signal?: AbortSignal }): Promise<ChatReply> } };
  readonly completions: { create(body: CompletionRequest, o?: { signal?: AbortSignal }): Promise<unknown> };   // prompt: string (BOS added where the model wants one) or token ids (taken as they are)
  tokenize(text: string, o?: { special?: boolean }): Promise<Uint32Array>;       // never adds BOS; special: match special tokens of any kind, else none
  detokenize(ids: Uint32Array, o?: { special?: boolean }): Promise<string>;      // special: keep control tokens
  countTokens(input: string | ChatMessage[]): Promise<number>;
  applyChatTemplate(messages: ChatMessage[], o?: { tools?: unknown[]; addGenerationPrompt?: boolean; [kwarg: string]: unknown }): Promise<string>;
  logits(ids: Uint32Array, o?: { all?: boolean }): Promise<Float32Array>;        // (V) of the last position, or (T, V)
  readonly sessions: {
    list(): Promise<SessionInfo[]>; get(id: string): Promise<SessionInfo | null>; fork(id: string, as: string): Promise<SessionInfo>;
    save(id: string): Promise<void>; delete(id: string): Promise<void>; clear(): Promise<void>;
  };
  readonly responses: { stats(): Promise<CacheStats>; clear(): Promise<void> };
  metrics(): Promise<Metrics>;
  profile(): Promise<Profile>;
  offlineReady(): Promise<{ ready: boolean; missing: string[] }>;
  close(): Promise<void>;                                      // ends the worker; what is pending rejects with "closed"
}
export interface SessionInfo { id: string; tokens: number; bytes: number; where: "memory" | "disk" | "both"; createdAt: number; usedAt: number }
export interface CacheStats { hits: number; misses: number; entries: number; bytes: number }
export interface Series { count: number; avg: number; min: number; max: number; p50: number; p95: number }
export interface Metrics {                                      // the last 100 requests; ms and tokens per second
  requests: number; ttftMs: Series; totalMs: Series; prefillTokensPerSecond: Series; decodeTokensPerSecond: Series;
  phasesMs: { queue: Series; tokenize: Series; prefill: Series; decode: Series; detokenize: Series };
  caches: { session: CacheStats & { reusedTokens: number; promptTokens: number }; response: CacheStats; tokenizer: CacheStats };
  memory: EngineInfo["memory"];
}
export interface Profile { tokens: number; wallMs: number; outsideKernelsMs: number; kernels: { name: string; calls: number; ms: number; bytes: number; ops: number }[] }

export interface ChatMessage { role: "system" | "user" | "assistant" | "tool"; content: string | null; reasoning_content?: string; tool_calls?: unknown[]; tool_call_id?: string; name?: string }
export interface Sampling { temperature?: number; top_p?: number; top_k?: number; min_p?: number; repetition_penalty?: number; presence_penalty?: number; frequency_penalty?: number; seed?: number; stop?: string | string[]; logit_bias?: Record<string, number>; max_tokens?: number; max_completion_tokens?: number }
export interface ChatRequest extends Sampling { messages: ChatMessage[]; model?: string; stream?: boolean; stream_options?: { include_usage?: boolean }; session_id?: string; cache?: "auto" | "off" | "refresh"; return_tokens?: boolean; tools?: unknown[]; tool_choice?: unknown; response_format?: unknown; logprobs?: boolean; top_logprobs?: number; n?: number; chat_template_kwargs?: Record<string, unknown> }
export interface CompletionRequest extends Sampling { prompt: string | ArrayLike<number>; stream?: boolean; session_id?: string; cache?: "auto" | "off" | "refresh"; return_tokens?: boolean }
export interface Usage { prompt_tokens: number; completion_tokens: number; total_tokens: number; prompt_tokens_details: { cached_tokens: number } }
export interface Extra {                                        // on the whole reply, and on the last chunk of a stream
  session_id: string | null; cached: boolean; cached_ratio: number; dropped_messages: number;
  timings: { queue_ms: number; tokenize_ms: number; prefill_ms: number; ttft_ms: number; decode_ms: number; total_ms: number; prefill_tokens_per_second: number; decode_tokens_per_second: number };
}
export type FinishReason = "stop" | "length" | "tool_calls" | "abort";
export interface ChatReply { id: string; object: "chat.completion"; created: number; model: string; choices: { index: number; message: ChatMessage; finish_reason: FinishReason; token_ids?: number[] }[]; usage: Usage; qandle: Extra }
export interface ChatChunk { id: string; object: "chat.completion.chunk"; created: number; model: string; choices: { index: number; delta: Partial<ChatMessage>; finish_reason: FinishReason | null; token_ids?: number[] }[]; usage?: Usage; qandle?: Extra }

export interface Estimate { name: string; parameters: number; quantization: string; downloadBytes: number; peakBytes: number; contextLength: number; fits: boolean; reason?: string; proposal?: { contextLength?: number }; diskFreeBytes: number | null }
export interface StoredModel { source: string; name: string; bytes: number; storedBytes: number; complete: boolean; imageBytes: number; usedAt: number }
export const models: {
  list(): Promise<StoredModel[]>; estimate(s: ModelSource, o?: { contextLength?: number; signal?: AbortSignal }): Promise<Estimate>; has(s: ModelSource): Promise<boolean>;
  verify(s: ModelSource): Promise<{ chunks: number; bad: number; repaired: number }>; delete(s: ModelSource): Promise<void>; storage(): Promise<{ usedBytes: number; quotaBytes: number; persisted: boolean }>;
};
export type ErrorCode = "not_a_model" | "bad_model" | "unsupported_model" | "unsupported_quantization" | "too_large" | "out_of_memory" | "network" | "http_status" | "integrity" | "invalid_request" | "template_error" | "context_overflow" | "numeric" | "worker_died" | "closed" | "unsupported_browser";
export class QandleError extends Error { readonly code: ErrorCode; readonly detail?: Record<string, unknown> }
// An abort rejects with a DOMException named "AbortError"; a stream that is left or aborted after its first chunk just ends.
