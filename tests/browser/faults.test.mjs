// What goes wrong, and what must not: bad files, aborts, concurrent requests, killed workers, split characters.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { residentBytes } from "../bench/guard.mjs";
import { model05, openBrowser, packagePage, packageSite } from "./harness.mjs";

// A bad file is refused this fast, and with this little growth.
const REJECT_MS = 100;
const GROWTH = 1024 * 1024;
const ABORT_MS = 300;
const DEATH_MS = 1000;
// Of what an engine takes, this share may stay with the browser.
const GIVEN_BACK = 0.3;

let site, browser;
before(async () => {
  site = await packageSite();
  browser = await openBrowser("chromium");
});
after(async () => {
  await browser?.close();
  await site?.close();
});

const tiny = "/fixtures/golden/tiny-q4km_h256_untied.gguf";

test("every bad file is refused by its code, and a good one loads after each", async () => {
  const manifest = JSON.parse(await readFile(new URL("../fixtures/gguf/manifest.json", import.meta.url), "utf8"));
  const rows = Array.isArray(manifest) ? manifest : manifest.cases;
  const page = await packagePage(browser, site);
  for (const { file, load } of rows) {
    const found = await page.run(
      async ({ url, good }) => {
        const blob = await (await fetch(url)).blob();
        const attempt = async (source) => {
          const begun = performance.now();
          try {
            const engine = await window.qandle.load(source, { threads: 1 });
            const bytes = engine.info.memory.wasmBytes;
            await engine.close();
            return { code: "ok", ms: performance.now() - begun, bytes };
          } catch (error) {
            return { code: error.code ?? error.name, message: error.message, ms: performance.now() - begun };
          }
        };
        return { bad: await attempt(blob), good: await attempt(good) };
      },
      { url: `/fixtures/gguf/${file}`, good: tiny },
    );
    assert.equal(found.bad.code, load, `${file}: ${found.bad.message}`);
    assert.equal(found.good.code, "ok", `the good file after ${file}: ${found.good.message}`);
  }
  await page.close();
});

test("bad files cost neither time nor memory in the worker that then loads a good one", async () => {
  const manifest = JSON.parse(await readFile(new URL("../fixtures/gguf/manifest.json", import.meta.url), "utf8"));
  const rows = (Array.isArray(manifest) ? manifest : manifest.cases).filter(({ load }) => load !== "ok");
  const page = await packagePage(browser, site);
  // One worker without the client: the messages themselves, so that the same worker takes the next file.
  const found = await page.run(
    async ({ files, good }) => {
      const worker = new Worker("/pkg/worker.js", { type: "module" });
      const waiting = new Map();
      let ready;
      const started = new Promise((resolve) => { ready = resolve; });
      worker.onmessage = ({ data }) => {
        if (data.type === "ready" || data.type === "fatal") ready(data);
        if (data.type === "done" || data.type === "error") waiting.get(data.id)?.(data);
      };
      worker.postMessage({ type: "init", tier: "simd128", threads: 1, lockName: "bad-files" });
      const state = await started;
      if (state.type !== "ready") throw new Error(JSON.stringify(state));
      let id = 0;
      const load = (blob) => new Promise((resolve) => {
        waiting.set(++id, resolve);
        worker.postMessage({ type: "request", id, method: "load", params: { source: { blob }, options: {} } });
      });
      const results = [];
      for (const file of files) {
        const blob = await (await fetch(`/fixtures/gguf/${file}`)).blob();
        const begun = performance.now();
        const { error, memory } = await load(blob);
        results.push({ file, code: error?.code, message: error?.message, ms: performance.now() - begun, bytes: memory.wasmBytes });
      }
      const last = await load(await (await fetch(good)).blob());
      worker.terminate();
      return { results, last: last.type, bytes: last.memory?.wasmBytes };
    },
    { files: rows.map(({ file }) => file), good: tiny },
  );
  for (const [i, { file, code, message, ms, bytes }] of found.results.entries()) {
    assert.equal(code, rows[i].load, `${file}: ${message}`);
    assert.ok(ms <= REJECT_MS, `${file}: refused after ${ms} ms`);
    const before = found.results[Math.max(0, i - 1)].bytes;
    assert.ok(bytes - before < GROWTH, `${file}: memory grew by ${bytes - before}`);
  }
  assert.equal(found.last, "done");
  await page.close();
});

test("a model without tokenizer answers token ids, and refuses text by its code", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async () => {
    const engine = await window.qandle.load("/fixtures/gguf/m01_tiny_tied_ok.gguf", { threads: 1 });
    const logits = await engine.logits(new Uint32Array([1, 2, 3]));
    const reply = await engine.completions.create({ prompt: [1, 2, 3], max_tokens: 4, temperature: 0, return_tokens: true });
    const codes = [];
    for (const call of [() => engine.tokenize("a"), () => engine.detokenize(new Uint32Array([1])), () => engine.chat.completions.create({ messages: [{ role: "user", content: "a" }] }), () => engine.completions.create({ prompt: "a" })]) {
      codes.push(await call().then(() => "ok", (error) => error.code));
    }
    const late = await engine.logits(new Uint32Array([1])).then(() => "ok", (error) => error.code);
    await engine.close();
    return { length: logits.length, tokens: reply.choices[0].token_ids.length, codes, late };
  });
  assert.deepEqual(found, { length: 96, tokens: 4, codes: Array(4).fill("unsupported_model"), late: "ok" });
  await page.close();
});

test("senseless requests are invalid_request and the next good one works", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async (url) => {
    const engine = await window.qandle.load(url, { threads: 1 });
    const messages = [{ role: "user", content: "hi" }];
    const deep = [];
    let inner = deep;
    for (let i = 0; i < 5000; i++) inner = (inner[0] = []);
    const bodies = [{ messages, temperature: NaN }, { messages, temperature: 3 }, { messages, top_p: Infinity }, { messages, top_k: 1.5 }, { messages, foo: 1 }, { messages: [] }, {}, { messages, tools: deep }, { messages, max_tokens: 0 }, { messages, stop: [""] }, { messages, logit_bias: { 999999999: 1 } }];
    const codes = [];
    for (const body of bodies) codes.push(await engine.chat.completions.create(body).then(() => "ok", (error) => error.code ?? error.name));
    const ids = await engine.logits(new Uint32Array([4294967295])).then(() => "ok", (error) => error.code);
    const long = await engine.completions.create({ prompt: Array(6000).fill(1), max_tokens: 1 }).then(() => "ok", (error) => error.code);
    const good = await engine.completions.create({ prompt: [1, 2], max_tokens: 2, temperature: 0, return_tokens: true });
    await engine.close();
    return { codes, ids, long, good: good.choices[0].token_ids.length };
  }, tiny);
  assert.deepEqual(found, { codes: Array(11).fill("invalid_request"), ids: "invalid_request", long: "context_overflow", good: 2 });
  await page.close();
});

for (const threads of [1, 2]) {
  test(`an abort in a 2,000-token prefill returns at once and leaves no trace, threads: ${threads}`, async () => {
    const page = await packagePage(browser, site);
    const found = await page.run(
      async ({ url, threads }) => {
        const engine = await window.qandle.load(url, { threads });
        const prompt = Array.from({ length: 2000 }, (_, i) => 1000 + ((i * 7919) % 50000));
        const short = prompt.slice(0, 40);
        const ask = (ids, o, extra = {}) => engine.completions.create({ prompt: ids, max_tokens: 8, temperature: 0, cache: "off", return_tokens: true, ...extra }, o);
        const cold = (await ask(short)).choices[0].token_ids;
        const waits = [];
        for (const wait of [0, 200, 900]) {
          const controller = new AbortController();
          const pending = ask(prompt, { signal: controller.signal }, { session_id: "long" }).then(() => "done", (error) => error.name);
          await new Promise((resolve) => setTimeout(resolve, wait));
          const begun = performance.now();
          controller.abort();
          const name = await pending;
          const ms = performance.now() - begun;
          // The worker itself is free again when it answers the next small question; what that takes by itself is the unit.
          await engine.logits(new Uint32Array([1]));
          const free = performance.now() - begun;
          await engine.logits(new Uint32Array([1]));
          waits.push({ name, ms, free, unit: performance.now() - begun - free });
        }
        const again = (await ask(short)).choices[0].token_ids;
        const session = (await ask(short, undefined, { session_id: "long" })).choices[0].token_ids;
        await engine.close();
        return { cold, again, session, waits };
      },
      { url: model05, threads },
    );
    assert.deepEqual(found.again, found.cold);
    assert.deepEqual(found.session, found.cold);
    console.log(`  aborts took ${found.waits.map(({ ms, free, unit }) => `${Math.round(ms)} ms (worker free after ${Math.round(free)}, one token ${Math.round(unit)})`).join(", ")}`);
    for (const { name, ms, free, unit } of found.waits) {
      assert.equal(name, "AbortError");
      assert.ok(ms <= ABORT_MS, `the abort returned after ${ms} ms`);
      // Less what the small question takes by itself, measured in the same run.
      assert.ok(free - unit <= ABORT_MS, `the worker was busy for ${free} ms, a one-token pass takes ${unit} ms`);
    }
    await page.close();
  });
}

test("two requests at once give each its solo text, streams are left early, and text joins to the whole", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async (url) => {
    const engine = await window.qandle.load(url, {});
    const ask = (text, extra = {}) => engine.chat.completions.create({ messages: [{ role: "user", content: text }], temperature: 0, max_tokens: 24, cache: "off", ...extra });
    const text = (reply) => reply.choices[0].message.content;
    const solo = [text(await ask("Name three colours.")), text(await ask("用一句话介绍北京。"))];
    const both = (await Promise.all([ask("Name three colours."), ask("用一句话介绍北京。")])).map(text);
    const left = await ask("Count to fifty.", { stream: true });
    for await (const chunk of left) if (chunk.choices[0]?.delta.content) break;
    const streamed = [];
    let usage, extra;
    for await (const chunk of await ask("Repeat exactly: 🦙🚀👩‍👩‍👧 ok", { stream: true, stream_options: { include_usage: true }, max_tokens: 40 })) {
      if (chunk.choices[0]?.delta.content) streamed.push(chunk.choices[0].delta.content);
      usage = chunk.usage ?? usage;
      extra = chunk.qandle ?? extra;
    }
    const whole = text(await ask("Repeat exactly: 🦙🚀👩‍👩‍👧 ok", { max_tokens: 40 }));
    await engine.close();
    return { solo, both, streamed, whole, usage, extra };
  }, model05);
  assert.deepEqual(found.both, found.solo);
  assert.equal(found.streamed.join(""), found.whole);
  assert.ok(found.streamed.every((delta) => !delta.includes("\ufffd")), "no delta shows a broken character");
  assert.match(found.whole, /🚀👩‍👩‍👧/u);
  assert.ok(found.usage.total_tokens > 40 && found.extra.timings.total_ms > 0);
  await page.close();
});

test("a second turn of a session computes only what is new, and a repeated one nothing", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async (url) => {
    const engine = await window.qandle.load(url, {});
    const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
    const ask = (extra) => engine.chat.completions.create({ messages, temperature: 0, max_tokens: 16, cache: "off", ...extra });
    const one = await ask({ session_id: "a" });
    messages.push(one.choices[0].message, { role: "user", content: "And of Italy?" });
    const two = await ask({ session_id: "a" });
    const cold = await ask({ session_id: "b" });
    const streamed = async () => {
      const begun = performance.now();
      const chunks = [];
      for await (const chunk of await ask({ cache: "auto", stream: true })) chunks.push(chunk);
      const deltas = chunks.map(({ choices }) => choices);
      return { deltas, cached: chunks.at(-1).qandle.cached, ms: performance.now() - begun };
    };
    const repeats = [await streamed(), await streamed(), await streamed()];
    const sessions = await engine.sessions.list();
    await engine.close();
    return { two, cold, repeats, ids: sessions.map(({ id }) => id) };
  }, model05);
  const { cached_tokens: cached } = found.two.usage.prompt_tokens_details;
  assert.ok(cached > 40, `${cached} prompt tokens were reused`);
  assert.equal(found.cold.usage.prompt_tokens_details.cached_tokens, 0);
  assert.equal(found.two.choices[0].message.content, found.cold.choices[0].message.content);
  assert.deepEqual(found.ids.sort(), ["a", "b"]);
  const [first, ...again] = found.repeats;
  assert.equal(first.cached, false);
  for (const { deltas, cached, ms } of again) {
    assert.deepEqual({ deltas, cached }, { deltas: first.deltas, cached: true });
    assert.ok(ms < first.ms / 4, `${ms} ms, computed in ${first.ms}`);
  }
  await page.close();
});

// Chromium lets a busy thread go on for two seconds before it ends it.
for (const [what, threads, victim, ms] of [["worker", 1, 0, DEATH_MS], ["worker", 2, 0, DEATH_MS], ["thread", 2, 1, 2000 + DEATH_MS]]) {
  test(`a ${what} that is terminated rejects what is pending within ${ms} ms, threads: ${threads}`, async () => {
    const page = await packagePage(browser, site);
    const found = await page.run(
      async ({ url, threads, victim }) => {
        const workers = [];
        const Real = window.Worker;
        window.Worker = class extends Real {
          constructor(...all) {
            super(...all);
            workers.push(this);
          }
        };
        const engine = await window.qandle.load(url, { threads });
        window.Worker = Real;
        const pending = engine.completions.create({ prompt: [1, 2, 3], max_tokens: 400, temperature: 0 }).then(() => "done", (error) => error.code);
        await new Promise((resolve) => setTimeout(resolve, 300));
        const begun = performance.now();
        workers[victim].terminate();
        const code = await pending;
        const ms = performance.now() - begun;
        const later = await engine.logits(new Uint32Array([1])).then(() => "done", (error) => error.code);
        return { code, ms, later };
      },
      { url: model05, threads, victim },
    );
    assert.equal(found.code, "worker_died");
    assert.equal(found.later, "worker_died");
    assert.ok(found.ms <= ms, `pending work was told after ${found.ms} ms`);
    await page.close();
  });
}

for (const [name, threads] of [["chromium", 1], ["chromium", 2], ["firefox", 2]]) {
  test(`a closed engine's memory is given back while the page keeps the engine, ${name}, threads: ${threads}`, async () => {
    const own = await openBrowser(name);
    try {
      const page = await packagePage(own, site);
      const before = residentBytes(own.pid, true);
      await page.run(async ({ url, threads }) => {
        window.kept = await window.qandle.load(url, { threads });
      }, { url: model05, threads });
      const loaded = residentBytes(own.pid, true) - before;
      assert.ok(loaded > 400e6, `the loaded engine takes ${loaded} bytes`);
      await page.run(() => window.kept.close());
      let left = loaded;
      for (let i = 0; i < 40 && left > GIVEN_BACK * loaded; i++) {
        await new Promise((resolve) => setTimeout(resolve, 250));
        left = residentBytes(own.pid, true) - before;
      }
      assert.ok(left <= GIVEN_BACK * loaded, `${left} of ${loaded} bytes are still held 10 s after close`);
    } finally {
      await own.close();
    }
  });
}

test("a worker that traps rejects what is pending within a second, and a new load works", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async (url) => {
    // The package's own worker, with a wasm `unreachable` that runs in it a while after a message of the test's own.
    const trap = `
      import "${location.origin}/pkg/worker.js";
      const module = new Uint8Array([0,97,115,109,1,0,0,0,1,4,1,96,0,0,3,2,1,0,7,5,1,1,102,0,0,10,5,1,3,0,0,11]);
      const { f } = new WebAssembly.Instance(new WebAssembly.Module(module)).exports;
      addEventListener("message", ({ data }) => { if (data === "trap") setTimeout(f, 0); });`;
    const Real = window.Worker;
    let worker;
    window.Worker = function () {
      worker = new Real(URL.createObjectURL(new Blob([trap], { type: "text/javascript" })), { type: "module" });
      return worker;
    };
    const engine = await window.qandle.load(url, { threads: 1 });
    window.Worker = Real;
    const pending = [1, 2].map(() => engine.completions.create({ prompt: [1, 2, 3], max_tokens: 400, temperature: 0 }).then(() => "done", (error) => error.code));
    worker.postMessage("trap");
    const begun = performance.now();
    const codes = await Promise.all(pending);
    const ms = performance.now() - begun;
    const again = await window.qandle.load(url, { threads: 1 });
    const reply = await again.completions.create({ prompt: [1, 2], max_tokens: 2, temperature: 0, return_tokens: true });
    await again.close();
    return { codes, ms, tokens: reply.choices[0].token_ids.length };
  }, tiny);
  assert.deepEqual(found.codes, ["worker_died", "worker_died"]);
  assert.ok(found.ms <= DEATH_MS, `pending work was told after ${found.ms} ms`);
  assert.equal(found.tokens, 2);
  await page.close();
});

test("a body that breaks off is a network error, and the next mirror serves", async () => {
  const bytes = await readFile(new URL("../fixtures/golden/tiny-q4km_h256_untied.gguf", import.meta.url));
  const servers = [true, false].map((broken) =>
    createServer((request, response) => {
      response.writeHead(200, { "access-control-allow-origin": "*", "cross-origin-resource-policy": "cross-origin", "content-length": bytes.length });
      if (broken) response.write(bytes.subarray(0, 300_000), () => response.destroy());
      else response.end(bytes);
    }),
  );
  const urls = await Promise.all(servers.map((server) => new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(`http://127.0.0.1:${server.address().port}`)))));
  const page = await packagePage(browser, site);
  try {
    const found = await page.run(async ([bad, good]) => {
      const code = await window.qandle.load(`${bad}/x.gguf`, { threads: 1 }).then(() => "ok", (error) => error.code);
      const engine = await window.qandle.load("hf:owner/repo/x.gguf", { threads: 1, mirrors: { hf: [bad, good] } });
      const { name } = engine.info.model;
      await engine.close();
      return { code, name };
    }, urls);
    assert.equal(found.code, "network");
    assert.ok(found.name.length > 0);
  } finally {
    await page.close();
    for (const server of servers) server.close();
  }
});
