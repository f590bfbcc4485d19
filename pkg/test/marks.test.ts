import assert from "node:assert/strict";
import { test } from "node:test";
import { countKills, lookBack, Marker, STORE_LIMIT_MS } from "../src/marks.js";
import { MEMORY_MS, NO_PAST } from "../src/step_down.js";
import type { LoadOptions } from "../src/types.js";
import { BODY, type Bench, bench, MODEL } from "./bench.js";
import { FakeOrigin, type FakeTab, settled } from "./fake_page.js";
import { INFO, isOpen, texts } from "./fake_worker.js";

const CONFIG = { threads: 4, contextLength: 4096 };
const FRESH = { config: CONFIG, history: null };

/** A tab that loads, as far as the mark is concerned. */
async function loading(origin: FakeOrigin, phase = "load", source = MODEL): Promise<FakeTab> {
  const tab = origin.tab(source);
  new Marker(tab, FRESH).enter(phase);
  await settled();
  return tab;
}

test("a_mark_stands_while_something_goes_on_and_tells_its_phase", async () => {
  const origin = new FakeOrigin();
  const marker = new Marker(origin.tab(), FRESH);
  await settled();
  assert.deepEqual([origin.marks.size, origin.held.size], [0, 0]);
  marker.enter("start");
  await settled();
  assert.deepEqual(origin.ofKind("phase"), [
    { kind: "phase", source: MODEL, phase: "start", hidden: false, ...CONFIG },
  ]);
  marker.tell("load");
  marker.enter("generation");
  assert.equal(origin.ofKind("phase")[0]?.phase, "generation");
  marker.leave();
  assert.equal(origin.marks.size, 1);
  marker.leave();
  assert.equal(origin.marks.size, 0);
  await settled();
  assert.equal(origin.held.size, 0);
  marker.tell("late");
  marker.enter("generation");
  await settled();
  assert.deepEqual([origin.marks.size, origin.held.size], [1, 1]);
  marker.leave();
  assert.equal(origin.marks.size, 0);
});

test("what_ends_before_its_lock_or_the_store_came_leaves_nothing", async () => {
  const origin = new FakeOrigin();
  const tab = origin.tab();
  let arrive = () => {};
  tab.module = new Promise((resolve) => {
    arrive = resolve;
  });
  const marker = new Marker(tab, FRESH);
  for (let i = 0; i < 3; i++) {
    marker.enter("start");
    marker.leave();
  }
  marker.enter("load");
  await settled();
  assert.deepEqual([origin.marks.size, origin.held.size], [0, 1]);
  arrive();
  await settled();
  assert.equal(origin.ofKind("phase")[0]?.phase, "load");
  marker.leave();
  await settled();
  assert.deepEqual([origin.marks.size, origin.held.size], [0, 0]);
});

test("a_page_that_is_left_in_order_takes_its_mark_with_it_and_brings_it_back", async () => {
  const origin = new FakeOrigin();
  const tab = origin.tab();
  const marker = new Marker(tab, FRESH);
  marker.enter("load");
  await settled();
  tab.fire("pagehide");
  assert.equal(origin.marks.size, 0);
  marker.tell("warmup");
  tab.fire("visibilitychange");
  assert.equal(origin.marks.size, 0);
  tab.fire("pageshow");
  assert.equal(origin.ofKind("phase")[0]?.phase, "warmup");
  tab.hidden = true;
  tab.fire("visibilitychange");
  assert.equal(origin.ofKind("phase")[0]?.hidden, true);
  marker.leave();
  tab.fire("pageshow");
  assert.equal(origin.marks.size, 0);
  marker.enter("generation");
  await settled();
  tab.fire("pagehide");
  marker.leave();
  marker.enter("generation");
  await settled();
  assert.equal(origin.marks.size, 1, "the page came back after what was left had ended");
});

test("a_tab_that_was_killed_is_found_once_and_one_that_lives_never", async () => {
  const origin = new FakeOrigin();
  assert.deepEqual(await lookBack(origin.tab()), NO_PAST);
  assert.equal(origin.opened, 0, "nothing lies there: nothing is opened");
  const living = await loading(origin);
  const dead = await loading(origin, "warmup");
  const other = await loading(origin, "load", "http://localhost/other.gguf");
  dead.kill();
  other.kill();
  assert.deepEqual(await countKills(origin.tab()).then(({ inARow, last }) => [inARow, last?.phase]), [
    1,
    "warmup",
  ]);
  const found = await Promise.all([lookBack(origin.tab()), lookBack(origin.tab())]);
  const kills = found.flatMap(({ killed }) => killed ?? []);
  assert.deepEqual(
    kills.map(({ phase, threads, hidden }) => [phase, threads, hidden]),
    [["warmup", 4, false]],
  );
  assert.equal(origin.ofKind("phase").length, 2, "the living tab's and the other source's");
  assert.deepEqual(found.map(({ history }) => history?.steps).sort(), [1, undefined].sort());
  const again = await lookBack(origin.tab());
  assert.deepEqual([again.killed, again.history?.steps, again.history?.inARow], [null, 1, 1]);
  living.kill();
  assert.equal((await lookBack(origin.tab())).history?.inARow, 2);
  assert.deepEqual(await countKills(origin.tab()).then(({ inARow }) => inARow), 2);
  assert.equal((await lookBack(origin.tab("http://localhost/other.gguf"))).history?.steps, 1);
});

test("tabs_that_went_down_together_count_once_and_hidden_ones_not_at_all", async () => {
  const origin = new FakeOrigin();
  for (const tab of [await loading(origin), await loading(origin)]) tab.kill();
  assert.equal((await countKills(origin.tab())).inARow, 1);
  assert.equal((await lookBack(origin.tab())).history?.steps, 1);
  const hidden = origin.tab();
  hidden.hidden = true;
  new Marker(hidden, FRESH).enter("load");
  await settled();
  hidden.kill();
  assert.equal((await countKills(origin.tab())).inARow, 1);
  const { history, killed } = await lookBack(origin.tab());
  assert.deepEqual([history?.steps, killed?.hidden], [1, true]);
});

test("marks_of_another_kind_of_writer_and_old_kills_are_left_alone", async () => {
  const origin = new FakeOrigin();
  const phase = { kind: "phase", source: MODEL, phase: "load", ...CONFIG };
  const history = { kind: "history", source: MODEL, steps: 2, inARow: 2, phase: "load", ...CONFIG };
  const values = [
    null,
    5,
    "phase",
    [],
    {},
    { ...phase, threads: "4" },
    { ...phase, phase: null },
    { ...phase, contextLength: -1 },
    { ...history, at: "today" },
    { ...history, at: Date.now() - MEMORY_MS - 1 },
    { ...history, at: Date.now(), steps: null },
  ];
  values.forEach((value, i) => {
    origin.marks.set(String(i), { id: String(i), at: Date.now(), value });
  });
  assert.deepEqual(await lookBack(origin.tab()), NO_PAST);
  assert.deepEqual(await countKills(origin.tab()), { inARow: 0, last: null });
  origin.marks.set("good", { id: "good", at: 1, value: { ...history, at: Date.now() - MEMORY_MS + 5000 } });
  assert.equal((await lookBack(origin.tab())).history?.steps, 2);
});

test("without_the_store_or_the_locks_there_are_no_marks_and_no_failure", async (t) => {
  const origin = new FakeOrigin();
  (await loading(origin)).kill();
  const broken = origin.tab();
  broken.module = Promise.reject(new Error("404"));
  broken.module.catch(() => {});
  assert.deepEqual(await lookBack(broken), NO_PAST);
  new Marker(broken, FRESH).enter("load");
  const refused = origin.tab();
  refused.locks.request = () => Promise.reject(new DOMException("", "SecurityError"));
  const marker = new Marker(refused, FRESH);
  marker.enter("load");
  await settled();
  marker.leave();
  assert.equal(origin.ofKind("phase").length, 1);
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const slow = origin.tab();
  slow.module = new Promise(() => {});
  const past = lookBack(slow);
  t.mock.timers.tick(STORE_LIMIT_MS);
  assert.deepEqual(await past, NO_PAST);
});

/** A visit: loads in a tab of its own, up to the `load` request. */
async function visit(it: Bench, origin: FakeOrigin, options: LoadOptions = {}) {
  const nth = it.workers.length;
  const tab = origin.tab();
  it.marks = (source) => (source === MODEL ? tab : undefined);
  it.notices.length = 0;
  const loading = it.load(MODEL, options);
  loading.catch(() => {});
  const { worker } = await it.started(nth);
  const init = await worker.take(({ type }) => type === "init");
  const { id, params } = await worker.request("load");
  const sent = (params as { options: LoadOptions }).options;
  await settled();
  const codes = it.notices.map(({ code }) => code);
  return { tab, loading, worker, id, threads: init.threads, contextLength: sent.contextLength, codes };
}

test("each_silent_death_takes_the_next_load_a_step_down", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    const told = ["tab_was_killed", "stepped_down"];
    const expected: [number, number | undefined, string[]][] = [
      [4, undefined, []],
      [1, undefined, told],
      [1, 2048, told],
      [1, 1024, told],
      [1, 1024, told],
    ];
    for (const [threads, contextLength, codes] of expected) {
      const found = await visit(it, origin);
      assert.deepEqual([found.threads, found.contextLength, found.codes], [threads, contextLength, codes]);
      found.tab.kill();
    }
    assert.equal((await countKills(origin.tab())).inARow, 5);
  }));

test("what_the_caller_asks_for_wins_over_the_step", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    (await visit(it, origin)).tab.kill();
    const threads = await visit(it, origin, { threads: 4, contextLength: 512 });
    assert.deepEqual([threads.threads, threads.contextLength, threads.codes], [4, 512, ["tab_was_killed"]]);
    threads.tab.kill();
    const context = await visit(it, origin, { contextLength: 8192 });
    assert.deepEqual([context.threads, context.contextLength], [1, 8192]);
    assert.deepEqual(context.codes, ["tab_was_killed", "stepped_down"]);
  }));

test("every_orderly_end_leaves_no_mark", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    const controller = new AbortController();
    const ends: ((found: Awaited<ReturnType<typeof visit>>) => void)[] = [
      ({ worker, id }) => worker.error(id, "out_of_memory"),
      ({ worker }) => worker.crash("trap"),
      () => controller.abort(),
      ({ worker, id }) => worker.done(id, INFO),
      ({ tab }) => tab.fire("pagehide"),
    ];
    for (const end of ends) {
      const found = await visit(it, origin, {
        signal: controller.signal.aborted ? undefined : controller.signal,
      });
      assert.deepEqual([found.codes, origin.ofKind("phase").length], [[], 1]);
      end(found);
      await settled();
      assert.equal(origin.marks.size, 0, String(end));
      found.tab.kill();
    }
  }));

test("phases_of_the_load_and_generations_are_marked", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    const { loading, worker, id } = await visit(it, origin);
    const phase = () => origin.ofKind("phase")[0]?.phase;
    assert.equal(phase(), "start");
    for (const wanted of ["plan", "load", "warmup"] as const) {
      const step = {
        loaded: 1,
        total: 2,
        source: "network",
        bytesPerSecond: null,
        etaSeconds: null,
      } as const;
      worker.event(id, { type: "progress", progress: { ...step, phase: wanted, fraction: 0.5 } });
      await settled();
      assert.equal(phase(), wanted);
    }
    worker.done(id, INFO);
    const engine = await loading;
    const small = engine.countTokens("x");
    worker.done((await worker.request("countTokens")).id, 1);
    await small;
    assert.equal(phase(), undefined);
    const streaming = engine.chat.completions.create({ ...BODY, stream: true });
    const reply = engine.completions.create({ prompt: "x" });
    await settled();
    assert.equal(phase(), "generation");
    const chat = await worker.request("chat");
    worker.chunk(chat.id, "a");
    worker.done(chat.id);
    assert.deepEqual(await texts(await streaming), ["a"]);
    assert.equal(phase(), "generation", "another goes on");
    worker.error((await worker.request("completion")).id, "numeric");
    await assert.rejects(reply, { code: "numeric" });
    assert.equal(phase(), undefined);
    const left = engine.chat.completions.create({ ...BODY, stream: true });
    worker.chunk((await worker.request("chat", 1)).id, "a");
    for await (const _ of await left) break;
    assert.equal(phase(), undefined);
    const pending = engine.logits(Uint32Array.of(1));
    await settled();
    assert.equal(phase(), "generation");
    worker.crash("trap");
    await assert.rejects(pending, { code: "worker_died" });
    assert.equal(origin.marks.size, 0);
  }));

test("an_answer_keeps_the_step_and_ends_the_row_and_a_whole_one_clears_the_history", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    const answer = async (options?: LoadOptions) => {
      const { loading, worker, id, threads, codes } = await visit(it, origin, options);
      worker.done(id, INFO);
      const engine = await loading;
      const reply = engine.completions.create({ prompt: "x" });
      worker.done((await worker.request("completion")).id, { choices: [] });
      await reply;
      void engine.close();
      return { threads, codes };
    };
    (await visit(it, origin)).tab.kill();
    assert.deepEqual(await answer(), { threads: 1, codes: ["tab_was_killed", "stepped_down"] });
    assert.equal((await countKills(origin.tab())).inARow, 0);
    assert.deepEqual(await answer(), { threads: 1, codes: ["stepped_down"] });
    assert.deepEqual(await answer({ threads: 4 }), { threads: 4, codes: ["stepped_down"] });
    assert.equal(origin.ofKind("history").length, 1, "its context was halved");
    assert.deepEqual(await answer({ threads: 4, contextLength: 4096 }), { threads: 4, codes: [] });
    assert.equal(origin.marks.size, 0);
    assert.deepEqual(await answer(), { threads: 4, codes: [] });
  }));

test("a_model_that_was_made_for_less_than_the_step_gets_its_own_context", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    for (let i = 0; i < 2; i++) (await visit(it, origin)).tab.kill();
    const { loading, worker, id, contextLength } = await visit(it, origin);
    assert.equal(contextLength, 2048);
    worker.error(id, "invalid_request", "contextLength is 2048, expected 1 to 128");
    const again = await worker.request("load", 1);
    assert.equal((again.params as { options: LoadOptions }).options.contextLength, undefined);
    worker.done(again.id, INFO);
    assert.equal((await loading).info.contextLength, 128);
  }));

test("a_load_waits_for_no_store_where_nothing_lies", () =>
  bench(async (it) => {
    const origin = new FakeOrigin();
    const tab = origin.tab();
    tab.module = new Promise(() => {});
    it.marks = () => tab;
    const { engine } = await it.engine();
    assert.equal(engine.info.model.name, INFO.model.name);
    (await loading(origin)).kill();
    const controller = new AbortController();
    const waiting = it.load(MODEL, { signal: controller.signal });
    assert.ok(await isOpen(waiting), "the module does not come, but a mark lies there");
    controller.abort();
    await assert.rejects(waiting, { name: "AbortError" });
    assert.equal(it.workers.length, 1);
  }));
