// Memory: many sessions in little room, what is done after a load while nobody asks anything, and what is told of each request.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { browsers, openBrowser, packagePage, packageSite } from "./harness.mjs";

const model = "/fixtures/golden/tiny-q4km_h256_untied.gguf";
const chatModel = "/fixtures/golden/tiny-f16_r1_untied.gguf";

let site;
before(async () => {
  site = await packageSite();
});
after(() => site?.close());

async function inPage(name, run) {
  const browser = await openBrowser(name);
  try {
    await run(() => packagePage(browser, site));
  } finally {
    await browser.close();
  }
}

/** Two rounds of sessions of 300 tokens, each with a beginning of its own; the second round goes on with each. */
const manySessions = async ({ path, sessions, kvBytes }) => {
  const url = new URL(path, location.href).href;
  const limits = { maxSessions: 1000, kvBytes, diskBytes: 2 ** 31 };
  const engine = await window.qandle.load(url, { threads: 1, kv: "f32", limits });
  const cold = await window.qandle.load(url, { threads: 1, kv: "f32", cache: "none", warmup: false });
  const prompt = (i) => Array.from({ length: 300 }, (_, at) => (at < 2 ? [i % 200, Math.floor(i / 200) + (i % 7)][at] : (at * 37 + i * 11) % 200));
  const ask = async (of, prompt, session_id, cache) => {
    const { usage, choices } = await of.completions.create({ prompt, session_id, cache, max_tokens: 3, temperature: 0, return_tokens: true });
    return { ids: Array.from(choices[0].token_ids), cached: usage.prompt_tokens_details.cached_tokens };
  };
  const wrong = [];
  let most = 0;
  const histories = [];
  for (let round = 0; round < 2; round++) {
    for (let i = 0; i < sessions; i++) {
      const history = round === 0 ? prompt(i) : [...histories[i], 5, i % 200];
      const found = await ask(engine, history, `s${i}`, "refresh");
      most = Math.max(most, engine.info.memory.kvBytes);
      const kept = round === 0 ? 0 : histories[i].length - 1;
      // Another's beginning may be the same by its first token or two.
      if (round === 0 ? found.cached > 2 : found.cached !== kept) wrong.push(`session ${i}, round ${round}: ${found.cached} of ${kept} tokens`);
      if (i % 20 === 7) {
        const want = await ask(cold, history, undefined, "off");
        if (want.ids.join() !== found.ids.join()) wrong.push(`session ${i}, round ${round}: ${found.ids} instead of ${want.ids}`);
      }
      histories[i] = [...history, ...found.ids];
    }
  }
  const { caches } = await engine.metrics();
  const list = await engine.sessions.list();
  const result = { wrong, most, disk: caches.session.disk, inMemory: caches.session.entries, listed: list.length };
  await Promise.all([engine.close(), cold.close()]);
  return result;
};

for (const name of browsers) {
  test(`200 sessions go through 64 MiB and come back from the disk, ${name}`, () =>
    inPage(name, async (open) => {
      const page = await open();
      const kvBytes = 64 * 2 ** 20;
      const { wrong, most, disk, inMemory, listed } = await page.run(manySessions, { path: model, sessions: 200, kvBytes });
      assert.deepEqual(wrong, []);
      assert.ok(most <= kvBytes && most > kvBytes / 2, `${most} bytes of pages`);
      assert.equal(listed, 200);
      assert.ok(inMemory < 200 && disk.hits === 200, `${inMemory} in memory, ${JSON.stringify(disk)}`);
      assert.deepEqual(page.faults, []);
    }));

  test(`the session that was used last is in memory again after a load, and not used by that, ${name}`, () =>
    inPage(name, async (open) => {
      const visit = async (path) => {
        const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1 });
        const until = async (done) => {
          for (let i = 0; i < 200 && !done(await engine.sessions.list()); i++) await new Promise((resolve) => setTimeout(resolve, 50));
          return engine.sessions.list();
        };
        const found = await until((list) => list.length === 0 || list.some(({ where }) => where === "both"));
        const prompt = Array.from({ length: 100 }, (_, i) => (i * 37) % 200);
        const asked = [];
        for (const session_id of ["first", "last"]) {
          const { usage } = await engine.completions.create({ prompt: [session_id.length, ...prompt], session_id, max_tokens: 2, temperature: 0, cache: "refresh" });
          asked.push(usage.prompt_tokens_details.cached_tokens);
        }
        const left = await until((list) => list.every(({ where }) => where === "both"));
        const { disk } = (await engine.metrics()).caches.session;
        await engine.close();
        return { found, asked, left, disk };
      };
      const one = await (await open()).run(visit, model);
      assert.deepEqual([one.found, one.asked], [[], [0, 0]]);
      const two = await (await open()).run(visit, model);
      assert.deepEqual(two.found.map(({ id, where }) => `${id} ${where}`), ["last both", "first disk"]);
      assert.deepEqual(two.found.map(({ usedAt }) => usedAt), one.left.map(({ usedAt }) => Math.round(usedAt)));
      assert.deepEqual(two.asked, [100, 100]);
      assert.deepEqual([two.disk.hits, two.disk.misses], [1, 0], "the other one was asked for");
    }));
}

test("a system prompt given to the load is computed before the first chat, and each request is told of", () =>
  inPage("chromium", async (open) => {
    const page = await open();
    const run = async ({ path, wait, warmup }) => {
      const records = [];
      const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1, warmup, normalize: true, cache: "none", onMetrics: (record) => records.push(record) });
      await new Promise((resolve) => setTimeout(resolve, wait));
      const system = "You are a patient teacher. Answer in one sentence.";
      const ask = async (content) => {
        const { usage, choices, qandle } = await engine.chat.completions.create({ messages: [{ role: "system", content: system }, { role: "user", content }], max_tokens: 4, temperature: 0, return_tokens: true, session_id: "a" });
        return { ids: Array.from(choices[0].token_ids), cached: usage.prompt_tokens_details.cached_tokens, kept: qandle.cached, totalMs: qandle.timings.total_ms };
      };
      const answers = [await ask("What is 2 + 2?"), await ask(" What is   2 + 2?\n")];
      const aborted = new AbortController();
      const stream = await engine.chat.completions.create({ messages: [{ role: "user", content: "Count." }], stream: true, temperature: 0 }, { signal: aborted.signal });
      for await (const _ of stream) aborted.abort();
      const tokens = (await engine.tokenize(system)).length;
      await engine.close();
      return { answers, records, tokens };
    };
    const text = "You are a patient teacher. Answer in one sentence.";
    const warm = await page.run(run, { path: chatModel, wait: 1500, warmup: text });
    const cold = await page.run(run, { path: chatModel, wait: 0, warmup: false });
    assert.deepEqual(warm.answers.map(({ ids }) => ids), cold.answers.map(({ ids }) => ids));
    assert.equal(cold.answers[0].cached, 0);
    assert.ok(warm.answers[0].cached >= warm.tokens, `${warm.answers[0].cached} of ${warm.tokens} tokens`);
    for (const { answers, records } of [warm, cold]) {
      assert.deepEqual(answers.map(({ kept }) => kept), [false, true], "another spelling of the same question");
      assert.deepEqual(records.map(({ cached, sessionId }) => [cached, sessionId]), [[false, "a"], [true, "a"], [false, null]]);
      assert.deepEqual(records.slice(0, 2).map(({ totalMs }) => totalMs), answers.map(({ totalMs }) => totalMs));
      assert.equal(records[0].reusedTokens, answers[0].cached);
      assert.ok(records[1].memory.wasmBytes > 0 && records[1].hitRates.response === 0.5);
    }
    assert.deepEqual(page.faults, []);
  }));
