// The one error class of the package. Every failure that is not an abort is a `QandleError` with a stable `code`;
// an abort is a `DOMException` named `AbortError`, as in the rest of the platform.

/** The stable names of failures. Messages may change between versions, codes do not. */
export type ErrorCode =
  /** The bytes are no model at all: an HTML page, an empty body, another format. */
  | "not_a_model"
  /** A model file that is damaged, cut short or contradicts itself. */
  | "bad_model"
  /** A sound file of an architecture, tokenizer or layout that is not served. */
  | "unsupported_model"
  /** A sound file with a tensor type that is not served. */
  | "unsupported_quantization"
  /** The plan does not fit into this device or into 4 GiB of wasm memory. */
  | "too_large"
  /** An allocation failed while running. */
  | "out_of_memory"
  /** The network failed before or while the bytes were read. */
  | "network"
  /** The server answered with another status than the one needed. */
  | "http_status"
  /** The bytes differ from the hash that was promised. */
  | "integrity"
  /** A request or option is unknown, out of range or senseless. */
  | "invalid_request"
  /** The chat template refused the messages. */
  | "template_error"
  /** Prompt and answer do not fit into the context. */
  | "context_overflow"
  /** The model produced numbers that are not finite. */
  | "numeric"
  /** The worker trapped, was killed or could not start. Load again. */
  | "worker_died"
  /** The engine was closed. */
  | "closed"
  /** The browser lacks WebAssembly SIMD or workers. */
  | "unsupported_browser";

const CODES: Record<ErrorCode, true> = {
  not_a_model: true,
  bad_model: true,
  unsupported_model: true,
  unsupported_quantization: true,
  too_large: true,
  out_of_memory: true,
  network: true,
  http_status: true,
  integrity: true,
  invalid_request: true,
  template_error: true,
  context_overflow: true,
  numeric: true,
  worker_died: true,
  closed: true,
  unsupported_browser: true,
};

/** What may be known about an error beyond its message. */
export interface QandleErrorOptions extends ErrorOptions {
  /** The stable code; `invalid_request` when left out. */
  code?: ErrorCode;
  /** Numbers and names that belong to the message, such as `{ field, found, max }`. */
  detail?: Record<string, unknown>;
}

/** A failure of the engine, with a stable {@link ErrorCode}. */
export class QandleError extends Error {
  /** What went wrong. */
  readonly code: ErrorCode;
  /** Numbers and names that belong to the message. */
  readonly detail?: Record<string, unknown>;

  constructor(message?: string, options: QandleErrorOptions = {}) {
    super(message, options);
    this.name = "QandleError";
    this.code = options.code ?? "invalid_request";
    if (options.detail !== undefined) this.detail = options.detail;
  }
}

/** A `QandleError` with this code; the form used inside the package. */
export function failure(code: ErrorCode, message: string, options: QandleErrorOptions = {}): QandleError {
  return new QandleError(message, { ...options, code });
}

/** What aborted requests reject with. */
export function abortError(message = "the operation was aborted"): DOMException {
  return new DOMException(message, "AbortError");
}

/** Rejects what was asked for under a signal that has fired. */
export function throwIfAborted(signal: AbortSignal | undefined): void {
  if (signal?.aborted) throw abortError();
}

/** Error data from the worker as the error that the caller sees. */
export function errorFromWire(wire: WireError): QandleError | DOMException {
  if (wire.code === "aborted") return abortError(wire.message);
  if (isErrorCode(wire.code)) return failure(wire.code, wire.message, { detail: wire.detail });
  return failure("worker_died", `${wire.message} (unknown error code "${wire.code}")`, {
    detail: wire.detail,
  });
}

/** Any thrown value as error data that can be posted. */
export function errorToWire(thrown: unknown, fallback: ErrorCode): WireError {
  if (thrown instanceof QandleError)
    return { code: thrown.code, message: thrown.message, detail: thrown.detail };
  return { code: fallback, message: messageOf(thrown) };
}

/** A readable message of any thrown value. */
export function messageOf(thrown: unknown): string {
  if (thrown instanceof Error) return thrown.message === "" ? thrown.name : thrown.message;
  return String(thrown);
}

/** An error as data: what crosses the worker's border. */
export interface WireError {
  /** An {@link ErrorCode}, or `aborted` for a cancelled request. */
  code: string;
  message: string;
  detail?: Record<string, unknown>;
}

function isErrorCode(code: string): code is ErrorCode {
  return Object.hasOwn(CODES, code);
}
