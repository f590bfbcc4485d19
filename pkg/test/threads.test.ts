import assert from "node:assert/strict";
import { test } from "node:test";
import type { ThreadInit } from "../src/protocol.js";
import { BODY, type Bench, bench, type FakeLocks, MODEL, PLATFORM } from "./bench.js";
import { type FakeWorker, INFO, texts } from "./fake_worker.js";

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
    worker.talksAfterItsEnd = true;
    wantThreads(worker, 2);
    controller.abort();
    await assert.rejects(loading, { name: "AbortError" });
    await new Promise((resolve) => setTimeout(resolve, 20));
    assert.equal(it.threads.length, 0);
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
