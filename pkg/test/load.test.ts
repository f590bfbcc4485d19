import assert from "node:assert/strict";
import { test } from "node:test";
import type { LoadHost } from "../src/load.js";
import { makeLoad } from "../src/load.js";
import { START_LIMIT_MS } from "../src/spawn.js";
import type { Platform } from "../src/tiers.js";
import type { Engine, LoadOptions, ModelSource, Notice, Progress } from "../src/types.js";
import type { ThreadInit } from "../src/protocol.js";
import { FakeWorker, INFO, isOpen, texts } from "./fake_worker.js";

const MODEL = "http://localhost/m.gguf";
const PLATFORM: Platform = {
  validate: () => true,
  isolated: true,
  sharedMemory: true,
  cores: 4,
  workers: true,
};
const BODY = { messages: [{ role: "user" as const, content: "hi" }] };

/** Locks as the platform's: the request waits until `free` is called for its name, as when the worker ends. */
class FakeLocks {
  readonly #waiting = new Map<string, () => void>();

  request = ((name: string, options: LockOptions, got: () => void) =>
    new Promise<void>((resolve, reject) => {
      this.#waiting.set(name, () => resolve(got()));
      options.signal?.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    })) as LockManager["request"];

  free(name: string): void {
    this.#waiting.get(name)?.();
  }
}

class Bench {
  readonly workers: FakeWorker[] = [];
  readonly threads: FakeWorker[] = [];
  readonly locks = new FakeLocks();
  readonly notices: Notice[] = [];
  platform = PLATFORM;

  load(source: ModelSource = MODEL, options: LoadOptions = {}): Promise<Engine> {
    const host: LoadHost = {
      platform: () => this.platform,
      locks: this.locks as Pick<LockManager, "request">,
      createWorker: () => {
        const worker = new FakeWorker();
        this.workers.push(worker);
        return worker.page;
      },
      createThread: () => {
        const thread = new FakeWorker();
        this.threads.push(thread);
        return thread.page;
      },
    };
    return makeLoad(host)(source, { onNotice: (notice) => this.notices.push(notice), ...options });
  }

  async worker(nth = 0): Promise<FakeWorker> {
    for (;;) {
      const worker = this.workers[nth];
      if (worker !== undefined) return worker;
      await new Promise((resolve) => setTimeout(resolve, 1));
    }
  }

  /** The worker after its start, and the name of its lock. */
  async started(nth = 0): Promise<{ worker: FakeWorker; lockName: string }> {
    const worker = await this.worker(nth);
    const { lockName = "" } = await worker.take(({ type }) => type === "init");
    worker.say({ type: "locked" });
    worker.say({ type: "ready" });
    return { worker, lockName };
  }

  async engine(options: LoadOptions = {}): Promise<{ engine: Engine; worker: FakeWorker; lockName: string }> {
    const loading = this.load(MODEL, options);
    const { worker, lockName } = await this.started();
    worker.done((await worker.request("load")).id, INFO);
    return { engine: await loading, worker, lockName };
  }
}

/** Closes what a test left open, so that the process can end. */
async function bench(run: (bench: Bench) => Promise<void>): Promise<void> {
  const it = new Bench();
  try {
    await run(it);
  } finally {
    for (const worker of it.workers) {
      worker.crash("end of test");
      worker.close();
    }
  }
}

test("load_tells_progress_that_never_goes_back_and_ends_with_the_info", () =>
  bench(async (it) => {
    const seen: Progress[] = [];
    const loading = it.load(MODEL, {
      contextLength: 64,
      kv: "f32",
      threads: 2,
      tier: "simd128",
      onProgress: (p) => seen.push(p),
    });
    const { worker } = await it.started();
    const init = await worker.take(({ type }) => type === "init");
    assert.deepEqual([init.tier, init.threads], ["simd128", 2]);
    const { id, params } = await worker.request("load");
    assert.deepEqual(params, {
      source: { url: MODEL },
      options: { contextLength: 64, threads: 2, kv: "f32" },
    });
    const step = {
      phase: "load",
      loaded: 1,
      total: 2,
      source: "network",
      bytesPerSecond: null,
      etaSeconds: null,
    } as const;
    for (const fraction of [0, 0.5, 0.25, 1.5]) {
      worker.event(id, { type: "progress", progress: { ...step, fraction } });
    }
    worker.done(id, INFO);
    const engine = await loading;
    assert.deepEqual(
      seen.map((p) => p.fraction),
      [0, 0.5, 0.5, 1],
    );
    assert.equal(engine.info.runtime.isolated, true);
    assert.equal(engine.info.model.name, "tiny");
  }));

test("info_memory_is_live", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    const { memory } = engine.info;
    const reply = engine.countTokens("x");
    const { id } = await worker.request("countTokens");
    worker.say({ type: "done", id, result: 1, memory: { ...INFO.memory, kvBytes: 4096 } });
    await reply;
    assert.equal(memory.kvBytes, 4096);
    assert.equal(engine.info.memory.kvBytes, 4096);
  }));

test("what_is_wrong_is_told_before_a_worker_starts", () =>
  bench(async (it) => {
    const wrong: [ModelSource, LoadOptions, string][] = [
      [MODEL, { contextLength: 0 }, "invalid_request"],
      [MODEL, { contextLength: 1.5 }, "invalid_request"],
      [MODEL, { threads: 0 }, "invalid_request"],
      [MODEL, { tier: "avx" as "simd128" }, "invalid_request"],
      [MODEL, { kv: "f64" as "f32" }, "invalid_request"],
      [MODEL, { contextLenght: 5 } as LoadOptions, "invalid_request"],
      [MODEL, { toString: 5 } as unknown as LoadOptions, "invalid_request"],
      [MODEL, { limits: { maxSessions: -1 } }, "invalid_request"],
      [MODEL, { limits: { sessions: 1 } as LoadOptions["limits"] }, "invalid_request"],
      [MODEL, { signal: {} as AbortSignal }, "invalid_request"],
      [MODEL, { mirrors: { hf: [] } }, "invalid_request"],
      ["hf:owner/repo", {}, "invalid_request"],
      [null as unknown as string, {}, "invalid_request"],
      [[new Blob(), new Blob()], {}, "unsupported_model"],
    ];
    for (const [source, options, code] of wrong) {
      await assert.rejects(
        it.load(source, options),
        { code },
        `${JSON.stringify(source)} ${JSON.stringify(options)}`,
      );
    }
    it.platform = { ...PLATFORM, validate: () => false };
    await assert.rejects(it.load(), { code: "unsupported_browser" });
    assert.equal(it.workers.length, 0);
  }));

test("an_abort_before_the_start_starts_nothing", () =>
  bench(async (it) => {
    await assert.rejects(it.load(MODEL, { signal: AbortSignal.abort() }), { name: "AbortError" });
    assert.equal(it.workers.length, 0);
  }));

test("an_abort_while_the_worker_starts_ends_it", () =>
  bench(async (it) => {
    const controller = new AbortController();
    const loading = it.load(MODEL, { signal: controller.signal });
    const worker = await it.worker();
    await worker.take(({ type }) => type === "init");
    controller.abort();
    await assert.rejects(loading, { name: "AbortError" });
    assert.ok(worker.terminated);
  }));

test("an_abort_while_loading_cancels_and_closes", () =>
  bench(async (it) => {
    const controller = new AbortController();
    const loading = it.load(MODEL, { signal: controller.signal });
    const { worker } = await it.started();
    const { id } = await worker.request("load");
    controller.abort();
    await assert.rejects(loading, { name: "AbortError" });
    await worker.cancelled(id);
    worker.done((await worker.request("close")).id);
    while (!worker.terminated) await new Promise((resolve) => setTimeout(resolve, 1));
  }));

test("a_worker_that_is_ended_before_it_starts_is_dead_after_a_while", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  return bench(async (it) => {
    const loading = it.load(MODEL, { threads: 1 });
    t.mock.timers.tick(START_LIMIT_MS);
    await assert.rejects(loading, { code: "worker_died", message: /did not start/ });
    assert.ok(it.workers[0]?.terminated);
  });
});

test("a_browser_that_refuses_workers_or_channels_is_told_or_served", async () => {
  const refuse = () => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  };
  const host: LoadHost = {
    platform: () => PLATFORM,
    locks: undefined,
    createWorker: refuse,
    createThread: refuse,
  };
  await assert.rejects(makeLoad(host)(MODEL), { code: "worker_died", message: /insecure/ });
  const { BroadcastChannel } = globalThis;
  try {
    Object.assign(globalThis, {
      BroadcastChannel: class {
        constructor() {
          refuse();
        }
      },
    });
    await bench(async (it) => {
      const { engine } = await it.engine();
      assert.equal(engine.info.model.name, INFO.model.name);
    });
  } finally {
    Object.assign(globalThis, { BroadcastChannel });
  }
});

test("a_failed_load_ends_the_worker", () =>
  bench(async (it) => {
    const loading = it.load();
    const { worker } = await it.started();
    worker.error((await worker.request("load")).id, "not_a_model");
    await assert.rejects(loading, { code: "not_a_model" });
    worker.done((await worker.request("close")).id);
    while (!worker.terminated) await new Promise((resolve) => setTimeout(resolve, 1));
  }));

test("mirrors_are_asked_in_order_while_the_place_fails", () =>
  bench(async (it) => {
    const loading = it.load("hf:o/r/m.gguf@v1", {
      mirrors: { hf: ["http://one", "http://two/x/", "http://three"] },
    });
    const { worker } = await it.started();
    const urls = [];
    for (const [nth, code] of ["network", "http_status"].entries()) {
      const { id, params } = await worker.request("load", nth);
      urls.push((params as { source: { url: string } }).source.url);
      worker.error(id, code);
    }
    const { id, params } = await worker.request("load", 2);
    urls.push((params as { source: { url: string } }).source.url);
    worker.done(id, INFO);
    await loading;
    const tail = "o/r/resolve/v1/m.gguf";
    assert.deepEqual(urls, [`http://one/${tail}`, `http://two/x/${tail}`, `http://three/${tail}`]);
  }));

test("the_page_makes_the_threads_and_ends_them_with_the_engine", () =>
  bench(async (it) => {
    const loading = it.load();
    const worker = await it.worker();
    worker.say({ type: "locked" });
    const channels = wantThreads(worker, 3);
    while (it.threads.length < 3) await new Promise((resolve) => setTimeout(resolve, 1));
    const locks = new Set<string>();
    for (const [i, thread] of it.threads.entries()) {
      const { tier, port, lockName } = (await thread.take(() => true)) as unknown as ThreadInit;
      assert.equal(tier, "relaxed");
      locks.add(lockName);
      const arrived = new Promise((resolve) => {
        port.onmessage = ({ data }) => resolve(data);
      });
      channels[i]?.port1.postMessage(i);
      assert.equal(await arrived, i, "each has its own end of the engine's channel");
      port.close();
      assert.equal(worker.posted.length, 1, "the engine waits for all of them");
      thread.say({ type: "ready" });
    }
    await worker.take(({ type }) => type === "threads");
    worker.say({ type: "ready" });
    worker.done((await worker.request("load")).id, INFO);
    const engine = await loading;
    assert.equal(locks.size, 3);
    const closing = engine.close();
    worker.done((await worker.request("close")).id);
    await closing;
    assert.ok(it.threads.every(({ terminated }) => terminated));
  }));

test("threads_that_are_asked_for_after_the_end_are_not_made", () =>
  bench(async (it) => {
    const controller = new AbortController();
    const loading = it.load(MODEL, { signal: controller.signal });
    const worker = await it.worker();
    worker.say({ type: "locked" });
    wantThreads(worker, 2);
    controller.abort();
    await assert.rejects(loading, { name: "AbortError" });
    await new Promise((resolve) => setTimeout(resolve, 20));
    assert.ok(it.threads.every(({ terminated }) => terminated));
  }));

const FAILING_THREADS: Record<string, (thread: FakeWorker) => void> = {
  cannot_share_memory: (thread) => thread.say({ type: "failed", message: "no memory" }),
  have_no_script: (thread) => thread.crash(),
};

for (const [name, fail] of Object.entries(FAILING_THREADS)) {
  test(`threads_that_${name}_step_down_to_one`, () =>
    bench(async (it) => {
      const loading = it.load();
      const first = await it.worker();
      first.say({ type: "locked" });
      wantThreads(first, 1);
      while (it.threads.length < 1) await new Promise((resolve) => setTimeout(resolve, 1));
      for (const thread of it.threads) fail(thread);
      const { worker } = await it.started(1);
      assert.equal((await worker.take(({ type }) => type === "init")).threads, 1);
      assert.ok(first.terminated && it.threads[0]?.terminated);
      worker.done((await worker.request("load")).id, INFO);
      await loading;
    }));
}

test("threads_that_do_not_start_step_down_to_one", () =>
  bench(async (it) => {
    const loading = it.load();
    const first = await it.worker();
    assert.equal((await first.take(({ type }) => type === "init")).threads, 4);
    first.say({ type: "fatal", error: { code: "worker_died", message: "no shared memory" } });
    const { worker } = await it.started(1);
    assert.equal((await worker.take(({ type }) => type === "init")).threads, 1);
    assert.ok(first.terminated);
    worker.done((await worker.request("load")).id, INFO);
    await loading;
    assert.deepEqual(
      it.notices.map(({ code }) => code),
      ["stepped_down"],
    );
  }));

test("one_thread_that_does_not_start_is_the_error", () =>
  bench(async (it) => {
    const loading = it.load(MODEL, { threads: 1 });
    (await it.worker()).crash();
    await assert.rejects(loading, { code: "worker_died" });
    assert.equal(it.workers.length, 1);
  }));

test("a_page_that_is_not_isolated_is_told_and_gets_one_thread", () =>
  bench(async (it) => {
    it.platform = { ...PLATFORM, isolated: false };
    const { worker, engine } = await it.engine();
    assert.equal((await worker.take(({ type }) => type === "init")).threads, 1);
    assert.deepEqual(
      it.notices.map(({ code }) => code),
      ["not_isolated"],
    );
    assert.equal(engine.info.runtime.isolated, false);
  }));

/** Says that threads are wanted; port1 of each channel is the engine's. */
function wantThreads(worker: FakeWorker, count: number): MessageChannel[] {
  const channels = Array.from({ length: count }, () => new MessageChannel());
  const ports = channels.map(({ port2 }) => port2);
  worker.say({ type: "threads", ports }, ports);
  // The real thing is Node's, which would else keep the test running.
  for (const { port1 } of channels) (port1 as unknown as { unref(): void }).unref();
  return channels;
}

/** Starts one thread, and then does something to it. */
function withThread(worker: FakeWorker, { threads }: Bench, then: (thread: FakeWorker) => void): void {
  wantThreads(worker, 1);
  const timer = setInterval(() => {
    const [thread] = threads;
    if (thread === undefined) return;
    clearInterval(timer);
    thread.say({ type: "ready" });
    then(thread);
  }, 1);
}

const DEATHS: Record<string, (worker: FakeWorker, locks: FakeLocks, lockName: string, it: Bench) => void> = {
  a_thread_traps: (worker, _, __, it) =>
    withThread(worker, it, (thread) => thread.say({ type: "fatal", message: "unreachable" })),
  a_thread_ends_with_an_error: (worker, _, __, it) =>
    withThread(worker, it, (thread) => thread.crash("boom")),
  a_threads_lock_is_free: (worker, locks, lockName, it) =>
    withThread(worker, it, () => setTimeout(() => locks.free(`${lockName}-0`), 20)),
  the_lock_is_free: (_, locks, lockName) => locks.free(lockName),
  a_fatal_message: (worker) =>
    worker.say({ type: "fatal", error: { code: "worker_died", message: "unreachable" } }),
  an_error_event: (worker) => worker.crash("boom"),
  a_thread_panics: (_, __, lockName) => {
    const channel = new BroadcastChannel(lockName);
    channel.postMessage({ type: "fatal", message: "trap" });
    setTimeout(() => channel.close(), 50);
  },
};

for (const [name, kill] of Object.entries(DEATHS)) {
  test(`a_death_rejects_all_that_is_pending_and_all_that_follows_when_${name}`, () =>
    bench(async (it) => {
      const { engine, worker, lockName } = await it.engine();
      const streaming = engine.chat.completions.create({ ...BODY, stream: true });
      worker.chunk((await worker.request("chat")).id, "a");
      const stream = await streaming;
      const pending = [engine.tokenize("x"), engine.chat.completions.create(BODY), texts(stream)];
      await worker.request("tokenize");
      const since = performance.now();
      kill(worker, it.locks, lockName, it);
      for (const promise of pending) await assert.rejects(promise, { code: "worker_died" });
      assert.ok(performance.now() - since < 1000);
      await assert.rejects(engine.metrics(), { code: "worker_died" });
      assert.ok(worker.terminated);
      await engine.close();
    }));

  test(`a_death_during_the_load_rejects_it_when_${name}`, () =>
    bench(async (it) => {
      const loading = it.load();
      const { worker, lockName } = await it.started();
      await worker.request("load");
      kill(worker, it.locks, lockName, it);
      await assert.rejects(loading, { code: "worker_died" });
    }));
}

test("close_rejects_what_is_pending_with_closed_and_may_be_called_twice", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    const pending = [engine.tokenize("x"), engine.chat.completions.create({ ...BODY, stream: true })];
    const closing = engine.close();
    assert.equal(engine.close(), closing);
    for (const promise of pending) await assert.rejects(promise, { code: "closed" });
    await assert.rejects(engine.tokenize("y"), { code: "closed" });
    assert.ok(await isOpen(closing));
    worker.done((await worker.request("close")).id);
    await closing;
    assert.ok(worker.terminated);
  }));

test("close_ends_a_worker_that_does_not_answer", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    await engine.close();
    assert.ok(worker.terminated);
  }));

test("requests_reach_the_worker_as_the_protocol_says", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    const calls: [string, Promise<unknown>, unknown][] = [
      ["tokenize", engine.tokenize("t", { special: true }), { text: "t", special: true }],
      ["detokenize", engine.detokenize(Uint32Array.of(3)), { ids: Uint32Array.of(3), special: false }],
      ["countTokens", engine.countTokens(BODY.messages), { input: BODY.messages }],
      [
        "applyChatTemplate",
        engine.applyChatTemplate(BODY.messages, { addGenerationPrompt: true, thinking: false }),
        { messages: BODY.messages, options: { addGenerationPrompt: true, thinking: false } },
      ],
      [
        "logits",
        engine.logits(Uint32Array.of(1, 2), { all: true }),
        { ids: Uint32Array.of(1, 2), all: true },
      ],
      ["chat", engine.chat.completions.create(BODY), { body: BODY }],
      ["completion", engine.completions.create({ prompt: Uint32Array.of(5) }), { body: { prompt: [5] } }],
      ["metrics", engine.metrics(), {}],
      ["profile", engine.profile(), {}],
      ["sessions.list", engine.sessions.list(), {}],
      ["sessions.get", engine.sessions.get("a"), { id: "a" }],
      ["sessions.fork", engine.sessions.fork("a", "b"), { id: "a", as: "b" }],
      ["sessions.delete", engine.sessions.delete("a"), { id: "a" }],
      ["sessions.clear", engine.sessions.clear(), {}],
      ["responses.stats", engine.responses.stats(), {}],
      ["responses.clear", engine.responses.clear(), {}],
    ];
    for (const [method, promise, expected] of calls) {
      const { id, params } = await worker.request(method);
      assert.deepEqual(params, expected, method);
      worker.done(id, "result");
      await promise;
    }
  }));

test("numbers_that_would_change_on_the_way_are_refused", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    for (const prompt of [[-1], [1.5], [2 ** 32], [Number.NaN]]) {
      await assert.rejects(engine.completions.create({ prompt }), { code: "invalid_request" });
    }
    for (const temperature of [Number.NaN, Infinity]) {
      await assert.rejects(engine.chat.completions.create({ ...BODY, temperature }), {
        code: "invalid_request",
      });
    }
    await assert.rejects(engine.chat.completions.create(null as never), { code: "invalid_request" });
    await assert.rejects(engine.tokenize(5 as never), { code: "invalid_request" });
    assert.equal(worker.posted.filter(({ method }) => method !== undefined && method !== "load").length, 0);
  }));

test("a_signal_that_is_none_is_refused_and_null_stands_for_none", () =>
  bench(async (it) => {
    const { engine, worker } = await it.engine();
    const { completions, chat } = engine;
    for (const signal of [5, {}, "x"] as never[]) {
      for (const call of [
        () => chat.completions.create(BODY, { signal }),
        () => chat.completions.create({ ...BODY, stream: true }, { signal }),
        () => completions.create({ prompt: [1] }, { signal }),
        () => engine.tokenize("t", { signal }),
        () => engine.detokenize(Uint32Array.of(1), { signal }),
        () => engine.countTokens("t", { signal }),
        () => engine.logits(Uint32Array.of(1), { signal }),
      ]) {
        await assert.rejects(call(), { code: "invalid_request" });
      }
    }
    const pending = [engine.tokenize("t", null as never), engine.countTokens("t", { signal: null as never })];
    await worker.request("countTokens");
    const closing = engine.close();
    for (const promise of pending) await assert.rejects(promise, { code: "closed" });
    worker.done((await worker.request("close")).id);
    await closing;
  }));

test("what_is_not_served_yet_says_so", () =>
  bench(async (it) => {
    const { engine } = await it.engine();
    for (const call of [() => engine.sessions.save("a"), () => engine.offlineReady()]) {
      await assert.rejects(call(), { code: "invalid_request", message: /not available in this version/ });
    }
  }));

test("a_callback_that_throws_is_reported_and_does_not_break_the_load", async () => {
  const reported: unknown[] = [];
  globalThis.reportError = (thrown: unknown) => reported.push(thrown); // the browser's own; Node has none
  const wrong = new Error("from the callback");
  await bench(async (it) => {
    it.platform = { ...PLATFORM, isolated: false };
    const { engine } = await it.engine({
      onNotice: () => {
        throw wrong;
      },
    });
    assert.equal(engine.info.model.name, "tiny");
  });
  assert.deepEqual(reported, [wrong]);
});
