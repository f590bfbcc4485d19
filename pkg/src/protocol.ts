// The messages between the page and the worker: types only. Plain structured-clone data; every request has an integer
// id and gets events, then exactly one `done` or `error`. A cancelled request ends in `error` with code `aborted`,
// but a generation that already streams ends in `done` after a chunk with finish_reason "abort".

import type { WireError } from "./errors.js";
import type {
  CacheStats,
  ChatMessage,
  ChatReply,
  ChatRequest,
  Completion,
  CompletionRequest,
  EngineInfo,
  Estimate,
  LoadOptions,
  Metrics,
  Notice,
  Profile,
  Progress,
  RequestMetrics,
  SessionInfo,
  StoredModel,
  Tier,
} from "./types.js";

/**
 * A file that the worker can open: exactly one of a URL and a blob. `key` is what a file is kept under where several URLs
 * lead to it, as a hub's mirrors do: "hf:owner/repo/path@revision". Absent: its URL.
 */
export type WireFile = { url: string; key?: string } | { blob: Blob };

/** Safetensors, and the files that stand beside them. What is optional may be missing on its server. */
export interface WireRepository {
  files: WireFile[];
  config: WireFile;
  tokenizer: WireFile;
  tokenizerConfig?: WireFile;
  chatTemplate?: WireFile;
  generationConfig?: WireFile;
  quantize?: "none" | "q8_0" | "q4_0";
}

/** A model: one GGUF file, the shards of one in any order, or safetensors. */
export type WireSource = (WireFile & { sha256?: string }) | { files: WireFile[] } | WireRepository;

/** The load options that the worker reads. */
export const WIRE_OPTIONS = [
  "contextLength",
  "window",
  "threads",
  "kv",
  "cache",
  "fastImage",
  "warmup",
  "normalize",
  "limits",
  "phrases",
  "speculation",
] as const;

/** What was left out is absent. */
export type WireLoadOptions = Pick<LoadOptions, (typeof WIRE_OPTIONS)[number]>;

/** First message to the worker's shell. */
export interface Init {
  type: "init";
  tier: Tier;
  /** More than one asks for the threaded build. */
  threads: number;
  /** Web Lock that the worker holds for ever, and the name of the channel on which a dying thread speaks. */
  lockName: string;
}

/** What each method takes, and what its `done` carries. */
export interface Methods {
  load: { params: { source: WireSource; options: WireLoadOptions }; result: EngineInfo };
  chat: { params: { body: ChatRequest }; result: ChatReply | null };
  completion: { params: { body: CompletionRequest }; result: Completion | null };
  tokenize: { params: { text: string; special: boolean }; result: Uint32Array };
  detokenize: { params: { ids: Uint32Array; special: boolean }; result: string };
  countTokens: { params: { input: string | ChatMessage[] }; result: number };
  applyChatTemplate: {
    params: { messages: ChatMessage[]; options: Record<string, unknown> };
    result: string;
  };
  logits: { params: { ids: Uint32Array; all: boolean }; result: Float32Array };
  info: { params: NoParams; result: EngineInfo };
  metrics: { params: NoParams; result: Metrics };
  profile: { params: NoParams; result: Profile };
  "sessions.list": { params: NoParams; result: SessionInfo[] };
  "sessions.get": { params: { id: string }; result: SessionInfo | null };
  "sessions.fork": { params: { id: string; as: string }; result: SessionInfo };
  "sessions.save": { params: { id: string }; result: null };
  "sessions.delete": { params: { id: string }; result: null };
  "sessions.clear": { params: NoParams; result: null };
  "responses.stats": { params: NoParams; result: CacheStats };
  "responses.clear": { params: NoParams; result: null };
  "models.list": { params: NoParams; result: StoredModel[] };
  "models.estimate": { params: { source: WireSource; contextLength?: number }; result: Estimate };
  "models.has": { params: { source: WireFile }; result: boolean };
  "models.verify": {
    params: { source: WireFile };
    result: { chunks: number; bad: number; repaired: number };
  };
  "models.import": { params: { file: WireFile; source: WireFile }; result: null };
  "models.makeRoom": { params: { bytes: number }; result: string[] };
  "models.delete": { params: { source: WireFile }; result: null };
  "models.storage": {
    params: NoParams;
    result: { usedBytes: number; quotaBytes: number; persisted: boolean };
  };
  close: { params: NoParams; result: null };
}

export type NoParams = Record<string, never>;
export type Method = keyof Methods;
export type Params<M extends Method> = Methods[M]["params"];
export type Result<M extends Method> = Methods[M]["result"];

/** A request of some method, as it is posted. */
export interface RequestMessage<M extends Method = Method> {
  type: "request";
  id: number;
  method: M;
  params: Params<M>;
}

/** Page → worker, after `init`. */
export type ToWorker = RequestMessage | { type: "cancel"; id: number };

/** Worker → page while a threaded build starts: a thread is wanted for each port. */
export interface ThreadsWanted {
  type: "threads";
  ports: MessagePort[];
}

/** Worker → page while it loads: a worker that reads, hashes and stores is wanted, behind this port. */
export interface KeeperWanted {
  type: "keeper";
  port: MessagePort;
}

/** Page → such a worker, once. */
export interface KeeperInit {
  keeper: MessagePort;
}

/** Where a chunk lies: in an origin private file, in a table of an IndexedDB database, or in a bucket of the Cache API. */
export type ChunkPlace =
  | { folder: string; file: string; at: number; length: number }
  | { database: string; table: string; key: string }
  | { bucket: string; url: string };

/**
 * Worker → keeper: bytes to be stored at a place; without bytes, what is stored there is wanted; without a place, files
 * that are open are to be closed.
 */
export interface KeepRequest {
  id: number;
  place?: ChunkPlace;
  bytes?: ArrayBuffer;
}

/** Keeper → worker: the SHA-256 of what is stored, in hex, and the memory back, or what was wanted; id 0: it listens. */
export type KeepReply = { id: number; bytes?: ArrayBuffer | undefined } & (
  | { hash?: string }
  | { error: { name: string; message: string } }
);

/**
 * Worker → thread, through its port: what they share. It does not pass through the page, whose garbage collector would
 * keep the whole memory of an engine that was closed until it next runs.
 */
export interface ThreadShare {
  init: { module_or_path: WebAssembly.Module; memory: WebAssembly.Memory };
  /** Address of the channel from which threads take their work. */
  receiver: number;
}

/** Page → worker: all threads listen. */
export interface ThreadsReady {
  type: "threads";
}

/** Page → thread, once. */
export interface ThreadInit {
  tier: Tier;
  /** Brings the {@link ThreadShare}. */
  port: MessagePort;
  /** Web Lock that the thread holds for ever. */
  lockName: string;
}

/** Thread → page: it listens, or cannot, or trapped. */
export type ThreadReply =
  | { type: "ready" }
  | { type: "failed"; message: string }
  | { type: "fatal"; message: string };

/** What may come before a request's end. */
export type RequestEvent =
  | { type: "progress"; progress: Progress }
  | { type: "notice"; notice: Notice }
  | { type: "metrics"; metrics: RequestMetrics }
  /** JSON text of an array of chunks: `ChatChunk` or `Completion`. */
  | { type: "chunks"; chunks: string };

/** Bytes in use, beside any event or result that carries it. */
export interface WithMemory {
  memory?: EngineInfo["memory"] | null;
}

/** Worker → page about one request. */
export type RequestReply =
  | ({ type: "event"; id: number; event: RequestEvent } & WithMemory)
  | ({ type: "done"; id: number; result: unknown } & WithMemory)
  | ({ type: "error"; id: number; error: WireError } & WithMemory);

/** Worker → page about the worker itself: the lock is held; the engine is there; nothing works any more. */
export type WorkerState =
  | { type: "locked" }
  | ThreadsWanted
  | KeeperWanted
  | { type: "ready" }
  | { type: "fatal"; error: WireError };

/** Worker → page. */
export type ToPage = RequestReply | WorkerState;

/** On the BroadcastChannel named `lockName`: a thread of the pool panicked while the engine's own thread waits for it. */
export interface PoolMessage {
  type: "fatal";
  message: string;
}

/** The half of a `Worker` or `MessagePort` that the client uses. */
export interface Endpoint {
  postMessage(message: unknown, transfer?: Transferable[]): void;
  addEventListener(type: "message", listener: (event: { data: unknown }) => void): void;
}

/** What the tier's glue exports to the shell. */
export interface Glue {
  /** Instantiates the wasm module. */
  default(options: { module_or_path: URL | string | Response | Promise<Response> }): Promise<unknown>;
  /** In threaded builds: starts the pool. */
  initThreadPool?(threads: number): Promise<unknown>;
  /**
   * The engine. `handle` takes each {@link ToWorker} message and never throws unless wasm trapped; a panic is announced
   * as a {@link PoolMessage} on the channel named `deathChannel`.
   */
  QandleWorker: new (
    post: GluePost,
    threads: number,
    deathChannel: string,
  ) => { handle(message: unknown): void };
}

/** How the engine speaks to the page. */
export type GluePost = (message: RequestReply | KeeperWanted) => void;
