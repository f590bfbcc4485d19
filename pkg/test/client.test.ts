import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, type ClientHooks } from "../src/client.js";
import { failure, QandleError } from "../src/errors.js";
import type { EngineInfo, Notice, RequestMetrics } from "../src/types.js";
import { chunk, FakeWorker, INFO, isOpen, RECORD, texts } from "./fake_worker.js";

const BODY = { messages: [{ role: "user" as const, content: "hi" }] };
const isAbort = { name: "AbortError" };

async function withClient(run: (worker: FakeWorker, client: Client) => Promise<void>, hooks?: ClientHooks) {
  const worker = new FakeWorker();
  try {
    await run(worker, new Client(worker.page, hooks));
  } finally {
    worker.close();
  }
}

test("done_resolves_with_the_result", () =>
  withClient(async (worker, client) => {
    const reply = client.request("tokenize", { text: "a", special: false });
    const { id, params } = await worker.request("tokenize");
    assert.deepEqual(params, { text: "a", special: false });
    worker.done(id, Uint32Array.of(1, 2));
    assert.deepEqual(await reply, Uint32Array.of(1, 2));
  }));

test("error_becomes_a_qandle_error_with_code_and_detail", () =>
  withClient(async (worker, client) => {
    const reply = client.request("info", {});
    const { id } = await worker.request("info");
    worker.say({ type: "error", id, error: { code: "too_large", message: "m", detail: { bytes: 5 } } });
    await assert.rejects(reply, (error) => {
      assert.ok(error instanceof QandleError);
      assert.deepEqual(
        [error.code, error.message, error.detail, error.name],
        ["too_large", "m", { bytes: 5 }, "QandleError"],
      );
      return true;
    });
  }));

test("an_unknown_code_is_still_a_known_code_for_the_caller", () =>
  withClient(async (worker, client) => {
    const reply = client.request("info", {});
    worker.error((await worker.request("info")).id, "constructor");
    await assert.rejects(reply, { code: "worker_died" });
  }));

test("aborted_from_the_worker_is_an_abort_error", () =>
  withClient(async (worker, client) => {
    const reply = client.request("info", {});
    worker.error((await worker.request("info")).id, "aborted");
    await assert.rejects(reply, (error) => error instanceof DOMException && error.name === "AbortError");
  }));

test("concurrent_requests_get_their_own_answers_in_any_order", () =>
  withClient(async (worker, client) => {
    const replies = ["a", "b", "c"].map((text) => client.request("countTokens", { input: text }));
    const ids = [];
    for (const nth of [0, 1, 2]) ids.push((await worker.request("countTokens", nth)).id);
    assert.equal(new Set(ids).size, 3);
    ids.forEach((id, nth) => void setTimeout(() => worker.done(id, nth), 6 - 2 * nth));
    assert.deepEqual(await Promise.all(replies), [0, 1, 2]);
  }));

test("unknown_ids_and_foreign_messages_are_ignored", () =>
  withClient(async (worker, client) => {
    const reply = client.request("info", {});
    const { id } = await worker.request("info");
    for (const stray of [null, 7, "x", {}, { type: 3 }, { type: "later" }]) worker.say(stray);
    worker.done(999, "wrong");
    worker.error(998, "numeric");
    worker.chunk(997, "wrong");
    worker.done(id, INFO);
    worker.done(id, "again");
    assert.equal((await reply).model.name, "tiny");
  }));

test("an_abort_sends_cancel_and_rejects_at_once", () =>
  withClient(async (worker, client) => {
    const controller = new AbortController();
    const reply = client.request("logits", { ids: Uint32Array.of(1), all: false }, controller);
    const { id } = await worker.request("logits");
    controller.abort();
    await assert.rejects(reply, isAbort);
    await worker.cancelled(id);
    worker.error(id, "aborted");
    const next = client.request("countTokens", { input: "x" });
    worker.done((await worker.request("countTokens")).id, 1);
    assert.equal(await next, 1);
  }));

test("a_signal_that_has_fired_posts_nothing", () =>
  withClient(async (worker, client) => {
    const signal = AbortSignal.abort();
    await assert.rejects(client.request("info", {}, { signal }), isAbort);
    await assert.rejects(client.stream("chat", { body: BODY }, { signal }), isAbort);
    assert.ok(await isOpen(worker.take(() => true)));
  }));

test("an_abort_after_the_answer_does_nothing", () =>
  withClient(async (worker, client) => {
    const controller = new AbortController();
    const reply = client.request("countTokens", { input: "x" }, controller);
    worker.done((await worker.request("countTokens")).id, 3);
    await reply;
    controller.abort();
    assert.ok(await isOpen(worker.take(({ type }) => type === "cancel")));
  }));

test("chunks_come_in_order_and_the_stream_ends_with_done", () =>
  withClient(async (worker, client) => {
    const opening = client.stream("chat", { body: BODY });
    const { id } = await worker.request("chat");
    for (let n = 0; n < 50; n++) worker.chunk(id, String(n));
    worker.done(id);
    assert.deepEqual(
      await texts(await opening),
      Array.from({ length: 50 }, (_, n) => String(n)),
    );
    assert.equal(worker.posted.filter(({ type }) => type === "cancel").length, 0);
  }));

test("a_stream_opens_with_the_first_chunk_and_not_before", () =>
  withClient(async (worker, client) => {
    const opening = client.stream("chat", { body: BODY });
    const { id } = await worker.request("chat");
    assert.ok(await isOpen(opening));
    worker.chunk(id, "a");
    const steps = (await opening)[Symbol.asyncIterator]();
    assert.equal((await steps.next()).value?.choices[0]?.delta.content, "a");
    const [second, third] = [steps.next(), steps.next()];
    worker.chunk(id, "b");
    worker.done(id);
    assert.equal((await second).value?.choices[0]?.delta.content, "b");
    assert.equal((await third).done, true);
  }));

test("a_refused_stream_rejects_in_create", () =>
  withClient(async (worker, client) => {
    const opening = client.stream("chat", { body: BODY });
    worker.error((await worker.request("chat")).id, "invalid_request");
    await assert.rejects(opening, { code: "invalid_request" });
  }));

test("an_error_in_a_stream_comes_after_its_chunks_and_once", () =>
  withClient(async (worker, client) => {
    const opening = client.stream("chat", { body: BODY });
    const { id } = await worker.request("chat");
    worker.chunk(id, "a");
    worker.error(id, "numeric");
    const steps = (await opening)[Symbol.asyncIterator]();
    assert.equal((await steps.next()).done, false);
    await assert.rejects(steps.next(), { code: "numeric" });
    assert.equal((await steps.next()).done, true);
  }));

test("leaving_the_loop_cancels_once_and_late_chunks_are_ignored", () =>
  withClient(async (worker, client) => {
    const opening = client.stream("chat", { body: BODY });
    const { id } = await worker.request("chat");
    worker.chunk(id, "a");
    worker.chunk(id, "b");
    const seen = [];
    for await (const part of await opening) {
      seen.push(part.choices[0]?.delta.content);
      break;
    }
    await worker.cancelled(id);
    worker.chunk(id, "late");
    worker.done(id);
    assert.deepEqual(seen, ["a"]);
    assert.deepEqual(await texts(await opening), []);
    assert.equal(worker.posted.filter(({ type }) => type === "cancel").length, 1);
  }));

test("an_abort_before_the_first_chunk_rejects", () =>
  withClient(async (worker, client) => {
    const controller = new AbortController();
    const opening = client.stream("chat", { body: BODY }, controller);
    const { id } = await worker.request("chat");
    controller.abort();
    await assert.rejects(opening, isAbort);
    await worker.cancelled(id);
  }));

test("an_abort_after_the_first_chunk_ends_with_the_last_one_only", () =>
  withClient(async (worker, client) => {
    const controller = new AbortController();
    const opening = client.stream("chat", { body: BODY }, controller);
    const { id } = await worker.request("chat");
    worker.chunk(id, "a");
    const stream = await opening;
    const seen = [];
    for await (const { choices } of stream) {
      seen.push([choices[0]?.delta.content, choices[0]?.finish_reason]);
      if (seen.length > 1) continue;
      controller.abort();
      await worker.cancelled(id);
      worker.chunk(id, "too late");
      worker.event(id, { type: "chunks", chunks: JSON.stringify([chunk("", "abort")]) });
      worker.done(id);
    }
    assert.deepEqual(seen, [
      ["a", null],
      ["", "abort"],
    ]);
  }));

test("an_aborted_stream_ends_even_if_the_worker_is_silent_or_fails", () =>
  withClient(async (worker, client) => {
    for (const nth of [0, 1]) {
      const controller = new AbortController();
      const opening = client.stream("chat", { body: BODY }, controller);
      const { id } = await worker.request("chat", nth);
      worker.chunk(id, "a");
      const steps = (await opening)[Symbol.asyncIterator]();
      await steps.next();
      const next = steps.next();
      controller.abort();
      if (nth === 1) worker.error(id, "aborted");
      assert.equal((await next).done, true);
    }
  }));

test("the_end_rejects_everything_pending_and_all_that_follows", () =>
  withClient(async (worker, client) => {
    const streaming = client.stream("chat", { body: BODY });
    worker.chunk((await worker.request("chat")).id, "a");
    const steps = (await streaming)[Symbol.asyncIterator]();
    await steps.next();
    const pending = [
      client.request("info", {}),
      client.stream("chat", { body: BODY }),
      steps.next(),
      client.request("metrics", {}),
    ];
    client.end(failure("worker_died", "gone"));
    client.end(failure("closed", "later"));
    for (const promise of pending) await assert.rejects(promise, { code: "worker_died" });
    await assert.rejects(client.request("info", {}), { code: "worker_died" });
    await assert.rejects(client.stream("chat", { body: BODY }), { code: "worker_died" });
  }));

test("parameters_that_cannot_be_sent_are_an_invalid_request", () =>
  withClient(async (worker, client) => {
    const body = { ...BODY, tools: [() => 1] };
    await assert.rejects(client.request("chat", { body }), { code: "invalid_request" });
    await assert.rejects(client.stream("chat", { body }), { code: "invalid_request" });
    const reply = client.request("countTokens", { input: "x" });
    worker.done((await worker.request("countTokens")).id, 1);
    assert.equal(await reply, 1);
  }));

test("memory_and_notices_reach_their_hooks_even_for_requests_that_are_gone", async () => {
  const memories: EngineInfo["memory"][] = [];
  const notices: Notice[] = [];
  const notice: Notice = { code: "quota", message: "full" };
  const records: RequestMetrics[] = [];
  const hooks: ClientHooks = {
    onMemory: (m) => memories.push(m),
    onNotice: (n) => notices.push(n),
    onMetrics: (m) => records.push(m),
  };
  await withClient(async (worker, client) => {
    worker.say({ type: "done", id: 77, result: null, memory: INFO.memory });
    worker.event(78, { type: "notice", notice });
    worker.event(0, { type: "metrics", metrics: RECORD });
    const reply = client.request("countTokens", { input: "x" });
    worker.done((await worker.request("countTokens")).id, 1);
    await reply;
  }, hooks);
  assert.deepEqual([memories, notices, records], [[INFO.memory], [notice], [RECORD]]);
});
