import assert from "node:assert/strict";
import { test } from "node:test";
import type { Glue, GluePost, RequestReply } from "../src/protocol.js";
import { type LoadGlue, runShell, type Scope } from "../src/shell.js";

const WASM = new URL("data:application/wasm;base64,AGFzbQEAAAA=");
const INIT = { type: "init", tier: "simd128", threads: 1, lockName: "l" };

type Listener = (event: { data?: unknown; error?: unknown; reason?: unknown }) => void;

/** A worker's global scope that keeps what is posted. */
class FakeScope {
  readonly posted: { type: string; id?: number; error?: { code: string; message: string } }[] = [];
  readonly #listeners = new Map<string, Listener>();
  locked = "";
  navigator = {
    locks: {
      request: ((name: string, hold: () => Promise<never>) => {
        this.locked = name;
        return hold();
      }) as unknown as LockManager["request"],
    },
  };

  /** What is to be moved is moved, so that what cannot be is noticed. */
  postMessage(message: unknown, transfer: Transferable[] = []): void {
    this.posted.push(structuredClone(message, { transfer }) as { type: string });
  }

  addEventListener(type: string, listener: Listener): void {
    this.#listeners.set(type, listener);
  }

  fire(type: string, event: Parameters<Listener>[0]): void {
    this.#listeners.get(type)?.(event);
  }

  async types(count: number): Promise<string[]> {
    while (this.posted.length < count) await new Promise((resolve) => setTimeout(resolve, 1));
    return this.posted.map(({ type }) => type);
  }
}

interface Shell {
  scope: FakeScope;
  handled: unknown[];
  /** Speaks as the engine does. */
  post(message: unknown): void;
}

function shell(glue: Partial<Glue> = {}, wasm: URL = WASM): Shell {
  const scope = new FakeScope();
  const handled: unknown[] = [];
  let say: GluePost | undefined;
  class QandleWorker {
    constructor(post: GluePost) {
      say = post;
    }
    handle(message: unknown): void {
      handled.push(message);
      if (message === "trap") throw new WebAssembly.RuntimeError("unreachable");
    }
  }
  const built = Promise.resolve({ default: async () => {}, QandleWorker, ...glue });
  const load: LoadGlue = () => ({ glue: built, wasm });
  runShell(scope as unknown as Scope, load);
  return { scope, handled, post: (message) => say?.(message as RequestReply) };
}

test("the_shell_takes_the_lock_starts_the_engine_and_hands_messages_on", async () => {
  const { scope, handled } = shell();
  scope.fire("message", { data: INIT });
  assert.deepEqual(await scope.types(2), ["locked", "ready"]);
  assert.equal(scope.locked, "l");
  scope.fire("message", { data: { type: "request", id: 1 } });
  assert.deepEqual(handled, [{ type: "request", id: 1 }]);
});

test("a_trap_anywhere_is_fatal", async () => {
  const { scope } = shell();
  scope.fire("message", { data: INIT });
  await scope.types(2);
  scope.fire("message", { data: "trap" });
  scope.fire("error", { error: new WebAssembly.RuntimeError("out of bounds") });
  scope.fire("unhandledrejection", { reason: new WebAssembly.RuntimeError("later") });
  const errors = scope.posted.slice(2).map(({ error }) => [error?.code, error?.message]);
  assert.deepEqual(errors, [
    ["worker_died", "unreachable"],
    ["worker_died", "out of bounds"],
    ["worker_died", "later"],
  ]);
});

test("a_start_that_fails_is_fatal_and_says_why", async () => {
  const failing: [Partial<Glue>, URL | undefined, number, string][] = [
    [{ default: () => Promise.reject(new Error("no idea")) }, undefined, 1, "worker_died"],
    [{ default: () => Promise.reject(new RangeError("no memory")) }, undefined, 1, "out_of_memory"],
    [{ default: () => Promise.reject(new WebAssembly.CompileError("magic")) }, undefined, 1, "network"],
    [{ default: () => Promise.reject(new DOMException("", "AbortError")) }, undefined, 1, "network"],
    [{}, new URL("data:text/html,hello"), 1, "network"],
    [{}, new URL("http://127.0.0.1:1/x.wasm"), 1, "network"],
    [{}, undefined, 4, "worker_died"],
    [{ initThreadPool: () => Promise.reject(new Error("no threads")) }, undefined, 4, "worker_died"],
  ];
  for (const [glue, wasm, threads, code] of failing) {
    const { scope } = shell(glue, wasm);
    scope.fire("message", { data: { ...INIT, threads } });
    assert.deepEqual(await scope.types(2), ["locked", "fatal"]);
    assert.equal(scope.posted[1]?.error?.code, code);
  }
});

test("a_build_that_cannot_be_imported_is_a_network_failure", async () => {
  const scope = new FakeScope();
  const glue = Promise.reject(new TypeError("Failed to fetch"));
  runShell(scope as unknown as Scope, () => ({ glue, wasm: WASM }));
  scope.fire("message", { data: INIT });
  assert.deepEqual(await scope.types(2), ["locked", "fatal"]);
  assert.equal(scope.posted[1]?.error?.code, "network");
});

test("an_answer_that_cannot_be_sent_is_an_error_and_arrays_of_numbers_are_moved", async () => {
  const { scope, post } = shell();
  scope.fire("message", { data: INIT });
  await scope.types(2);
  const own = Float32Array.of(1, 2);
  const part = new Float32Array(new ArrayBuffer(16), 4, 2);
  for (const result of [own, part, () => {}]) post({ type: "done", id: 7, result });
  post({ type: "event", id: 7, event: { type: "chunks", chunks: Symbol("not plain") } });
  assert.deepEqual([own.length, part.length], [0, 2]);
  const said = scope.posted.slice(2).map(({ type, id, error }) => [type, id, error?.code]);
  assert.deepEqual(said, [
    ["done", 7, undefined],
    ["done", 7, undefined],
    ["error", 7, "out_of_memory"],
    ["error", 7, "out_of_memory"],
  ]);
});

test("threads_are_started_before_the_engine_is_ready", async () => {
  const asked: number[] = [];
  const { scope } = shell({ initThreadPool: async (threads) => asked.push(threads) });
  scope.fire("message", { data: { ...INIT, threads: 3 } });
  assert.deepEqual(await scope.types(2), ["locked", "ready"]);
  assert.deepEqual(asked, [2], "the engine's own thread is one of them");
});

test("a_scope_without_locks_starts_all_the_same", async () => {
  const { scope } = shell();
  (scope as { navigator: unknown }).navigator = {};
  scope.fire("message", { data: INIT });
  assert.deepEqual(await scope.types(2), ["locked", "ready"]);
});
