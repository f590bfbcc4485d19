// The worker's shell: takes the lock, starts one build of the engine, then hands every message to it. Owns nothing of
// the engine; turns every trap into `fatal`, after which the page ends this worker.

import { errorToWire, failure, messageOf } from "./errors.js";
import { holdLock } from "./lock.js";
import type { Glue, Init, KeeperWanted, RequestReply, WorkerState } from "./protocol.js";
import type { Tier } from "./types.js";

/** The part of a worker's global scope that is used. */
export interface Scope {
  postMessage(message: unknown, transfer?: Transferable[]): void;
  addEventListener(type: "message", listener: (event: { data: unknown }) => void): void;
  addEventListener(type: "error", listener: (event: { message?: string; error?: unknown }) => void): void;
  addEventListener(type: "unhandledrejection", listener: (event: { reason?: unknown }) => void): void;
  navigator?: { locks?: Pick<LockManager, "request"> };
}

/** Imports a build and says where its wasm file is. */
export type LoadGlue = (build: { tier: Tier; threaded: boolean }) => { glue: Promise<Glue>; wasm: URL };

/** Serves the protocol on a worker's scope. */
export function runShell(scope: Scope, loadGlue: LoadGlue): void {
  const say = (state: WorkerState) => scope.postMessage(state);
  const fatal = (thrown: unknown) => say({ type: "fatal", error: errorToWire(thrown, "worker_died") });
  let handle: ((message: unknown) => void) | undefined;

  scope.addEventListener("error", (event) => fatal(event.error ?? event.message ?? "unknown error"));
  scope.addEventListener("unhandledrejection", (event) => fatal(event.reason));
  scope.addEventListener("message", ({ data }) => {
    if (handle !== undefined) {
      try {
        handle(data);
      } catch (trap) {
        fatal(trap);
      }
      return;
    }
    if (!isInit(data)) return;
    start(data).catch(fatal);
  });

  async function start({ tier, threads, lockName }: Init): Promise<void> {
    // All at once: each is a way to the disk or the network.
    const locking = holdLock(scope.navigator?.locks, lockName);
    const { glue: importing, wasm } = loadGlue({ tier, threaded: threads > 1 });
    const fetching = fetchWasm(wasm);
    importing.catch(() => {});
    fetching.catch(() => {});
    await locking;
    say({ type: "locked" });
    const glue = await importing.catch((cause) => {
      throw failure("network", `the engine's script could not be loaded: ${messageOf(cause)}`, { cause });
    });
    const response = await fetching;
    await glue.default({ module_or_path: response }).catch((thrown) => {
      throw instantiationError(thrown, wasm);
    });
    if (threads > 1) await startPool(glue, threads);
    const engine = new glue.QandleWorker((message) => post(scope, message), threads, lockName);
    handle = (message) => engine.handle(message);
    say({ type: "ready" });
  }
}

/** Sends one message of the engine, with what must be moved. An answer that there is no memory to send is told: the page must not wait for it. */
function post(scope: Scope, message: RequestReply | KeeperWanted): void {
  if (message.type === "keeper") return scope.postMessage(message, [message.port]);
  try {
    scope.postMessage(message, message.type === "done" ? buffersOf(message.result) : []);
  } catch (thrown) {
    const error = failure("out_of_memory", `an answer could not be sent: ${messageOf(thrown)}`);
    scope.postMessage({ type: "error", id: message.id, error: errorToWire(error, error.code) });
  }
}

/** The memory of a result that is moved instead of copied: an array of numbers with a buffer of its own. */
function buffersOf(result: unknown): ArrayBuffer[] {
  if (!(result instanceof Float32Array || result instanceof Uint32Array)) return [];
  const { buffer, byteLength } = result;
  return buffer instanceof ArrayBuffer && buffer.byteLength === byteLength ? [buffer] : [];
}

/** The engine's own thread works too, so one less is asked of the page. */
async function startPool(glue: Glue, threads: number): Promise<void> {
  if (glue.initThreadPool === undefined) throw failure("worker_died", "this build has no threads");
  await glue.initThreadPool(threads - 1);
}

/** The wasm file's response, checked: a host that answers with its index page would fail as a wrong magic number. */
async function fetchWasm(url: URL): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, { credentials: "same-origin" });
  } catch (cause) {
    throw failure("network", `${url.href} could not be fetched: ${messageOf(cause)}`, { cause });
  }
  if (!response.ok) throw failure("http_status", `${url.href} answered ${response.status}`);
  const type = response.headers.get("content-type") ?? "";
  if (type.startsWith("text/html")) {
    throw failure("network", `${url.href} is an HTML page, not WebAssembly: is the folder wasm/ served?`);
  }
  return response;
}

/** Why a build did not start, where the kind of the error tells: no memory for it, or bytes that did not come whole. */
function instantiationError(thrown: unknown, url: URL): unknown {
  if (thrown instanceof RangeError) {
    return failure("out_of_memory", `no memory for the engine: ${thrown.message}`, { cause: thrown });
  }
  const cutShort =
    thrown instanceof WebAssembly.CompileError ||
    thrown instanceof TypeError ||
    (thrown instanceof DOMException && thrown.name === "AbortError");
  if (!cutShort) return thrown;
  const message = `${url.href} is damaged or was cut short: ${messageOf(thrown)}`;
  return failure("network", message, { cause: thrown });
}

function isInit(data: unknown): data is Init {
  return typeof data === "object" && data !== null && "type" in data && data.type === "init";
}
