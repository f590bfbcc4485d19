import assert from "node:assert/strict";
import { test } from "node:test";
import type { LoadHost } from "../src/load.js";
import { makeLoad } from "../src/load.js";
import { START_LIMIT_MS } from "../src/spawn.js";
import type { LoadOptions, ModelSource, Progress, RequestMetrics } from "../src/types.js";
import { BODY, bench, MODEL, PLATFORM } from "./bench.js";
import { INFO, isOpen, RECORD } from "./fake_worker.js";

test("load_tells_progress_that_never_goes_back_and_ends_with_the_info", () =>
  bench(async (it) => {
    const seen: Progress[] = [];
    const loading = it.load(MODEL, {
      contextLength: 64,
      window: 128,
      kv: "f32",
      normalize: true,
      phrases: ["hello"],
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
      options: { contextLength: 64, window: 128, threads: 2, kv: "f32", normalize: true, phrases: ["hello"] },
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

test("each_request_s_metrics_reach_the_callback_of_the_load_and_no_other_request", () =>
  bench(async (it) => {
    const records: RequestMetrics[] = [];
    const { engine, worker } = await it.engine({ onMetrics: (m) => records.push(m) });
    const reply = engine.countTokens("x");
    const { id } = await worker.request("countTokens");
    worker.event(0, { type: "metrics", metrics: RECORD });
    worker.done(id, 1);
    assert.equal(await reply, 1);
    assert.deepEqual(records, [RECORD]);
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
      [MODEL, { window: 0 }, "invalid_request"],
      [MODEL, { threads: 0 }, "invalid_request"],
      [MODEL, { tier: "avx" as "simd128" }, "invalid_request"],
      [MODEL, { kv: "f64" as "f32" }, "invalid_request"],
      [MODEL, { contextLenght: 5 } as LoadOptions, "invalid_request"],
      [MODEL, { toString: 5 } as unknown as LoadOptions, "invalid_request"],
      [MODEL, { limits: { maxSessions: -1 } }, "invalid_request"],
      [MODEL, { limits: { memoryBytes: 0.5 } }, "invalid_request"],
      [MODEL, { normalize: "yes" as unknown as boolean }, "invalid_request"],
      [MODEL, { onMetrics: 5 as unknown as () => void }, "invalid_request"],
      [MODEL, { limits: { sessions: 1 } as LoadOptions["limits"] }, "invalid_request"],
      [MODEL, { signal: {} as AbortSignal }, "invalid_request"],
      [MODEL, { mirrors: { hf: [] } }, "invalid_request"],
      [MODEL, { phrases: "hello" as unknown as string[] }, "invalid_request"],
      [MODEL, { phrases: [5] as unknown as string[] }, "invalid_request"],
      [MODEL, { phrases: Array<string>(257).fill("a") }, "invalid_request"],
      [MODEL, { phrases: ["a".repeat(262_145)] }, "invalid_request"],
      ["hf:owner/repo", {}, "invalid_request"],
      [null as unknown as string, {}, "invalid_request"],
      [[new Blob(), "m.gguf"] as unknown as Blob[], {}, "invalid_request"],
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
    marks: () => undefined,
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
    await assert.rejects(engine.offlineReady(), {
      code: "invalid_request",
      message: /not available in this version/,
    });
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
