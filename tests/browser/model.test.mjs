// The real 0.5B on every build in Chromium and in Firefox: the reference's choices, the same greedy tokens everywhere, and
// memory within its bound. With `--full` the 1.5B too.
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { full, model05, openBrowser, packagePage, packageSite, tiers } from "./harness.mjs";

// 8-bit activations beside transformers in float32 (fixtures/README.md has llama.cpp's own distance).
const TOP20 = 0.4;
const TOP5_LOGPROB = 0.35;
// The memory rule: packed weights, the tokenizer and all else, and the KV cache in use.
const WEIGHTS = 1.08;
const REST = 48 * 1024 * 1024;

const models = {
  "0.5b": { url: model05, cases: "logits_05b.json", margin: 0.5 },
  "1.5b": { url: "/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", cases: "logits_15b.json", margin: 0.7 },
};

let site, chromium, firefox;
before(async () => {
  site = await packageSite();
  chromium = await openBrowser("chromium");
  firefox = await openBrowser("firefox");
});
after(async () => {
  await chromium?.close();
  await firefox?.close();
  await site?.close();
});

const cases = async (name) => JSON.parse(await readFile(new URL(`../fixtures/golden/${name}`, import.meta.url), "utf8")).cases;
const there = (url) => existsSync(fileURLToPath(new URL(`../..${url}`, import.meta.url)));

/** For each case: the last position's logits at the reference's best 20, and the greedy tokens. */
async function answers(browser, { url }, build, list) {
  const page = await packagePage(browser, site);
  try {
    return await page.run(
      async ({ url, build, list }) => {
        let last = 0;
        let rising = true;
        const engine = await window.qandle.load(url, { ...build, onProgress: (p) => { rising &&= p.fraction >= last; last = p.fraction; } });
        const memory = { ...engine.info.memory };
        const results = [];
        for (const { ids, top20, greedy } of list) {
          const logits = await engine.logits(new Uint32Array(ids));
          let best = 0;
          let top = -Infinity;
          for (const [i, x] of logits.entries()) if (x > top) [top, best] = [x, i];
          let sum = 0;
          for (const x of logits) sum += Math.exp(x - top);
          const reply = await engine.completions.create({ prompt: ids, max_tokens: 48, temperature: 0, return_tokens: true, cache: "off" });
          results.push({ best, top20: top20.map((id) => logits[id]), lse: top + Math.log(sum), tokens: reply.choices[0].token_ids, expected: greedy.length });
        }
        const { bytes } = engine.info.model;
        const { runtime } = engine.info;
        const after = { ...engine.info.memory };
        await engine.close();
        return { results, memory, after, bytes, runtime, rising, last };
      },
      { url, build, list: list.map(({ ids, top20, greedy }) => ({ ids, top20, greedy })) },
    );
  } finally {
    await page.close();
  }
}

const first = new Map();

async function check(browser, key, build, list) {
  const model = models[key];
  const found = await answers(browser, model, build, list);
  assert.equal(found.runtime.tier, build.tier);
  assert.equal(found.runtime.threads, build.threads);
  assert.ok(found.rising && found.last === 1, "progress is one rising fraction that ends at 1");
  const limit = WEIGHTS * found.bytes + REST;
  console.log(`  ${key} ${build.tier}/${build.threads} ${browser.name}: wasm ${found.memory.wasmBytes} of ${Math.round(limit)} bytes allowed after load, ${found.after.wasmBytes} after use with ${found.after.kvBytes} of KV`);
  assert.ok(found.memory.wasmBytes <= limit, `wasm memory after load is ${found.memory.wasmBytes}, allowed ${Math.round(limit)}`);
  for (const [i, wanted] of list.entries()) {
    const got = found.results[i];
    assert.equal(got.best, wanted.top20[0], `${wanted.id}: the best token`);
    for (const [j, want] of wanted.top20_logits.entries()) {
      const off = Math.abs(got.top20[j] - want);
      assert.ok(off <= TOP20, `${wanted.id}: logit ${j} of the best 20 is off by ${off}`);
      if (j >= 5) continue;
      const logprob = Math.abs(got.top20[j] - got.lse - (want - wanted.logsumexp_last));
      assert.ok(logprob <= TOP5_LOGPROB, `${wanted.id}: log-probability ${j} is off by ${logprob}`);
    }
    const unsure = wanted.greedy_margin.findIndex((m) => m < model.margin);
    const sure = unsure < 0 ? wanted.greedy.length : unsure;
    assert.deepEqual(got.tokens.slice(0, sure), wanted.greedy.slice(0, sure), `${wanted.id}: greedy tokens where the reference is sure`);
    const id = `${key} ${wanted.id}`;
    if (!first.has(id)) first.set(id, got);
    assert.deepEqual(got.tokens, first.get(id).tokens, `${wanted.id}: greedy tokens differ from those of the first build`);
    assert.deepEqual(got.top20, first.get(id).top20, `${wanted.id}: logits differ from those of the first build`);
  }
}

for (const build of tiers) {
  const name = `${build.tier}, threads: ${build.threads}`;
  test(`the 0.5B chooses as the reference does, on ${name}, in Chromium`, async () => {
    await check(chromium, "0.5b", build, await cases("logits_05b.json"));
  });
}
for (const build of full ? tiers : [tiers[1], tiers[2]]) {
  const name = `${build.tier}, threads: ${build.threads}`;
  test(`the 0.5B gives the same tokens on ${name}, in Firefox`, async () => {
    const list = await cases("logits_05b.json");
    await check(firefox, "0.5b", build, full ? list : list.filter(({ ids }) => ids.length < 100));
  });
}
if (full) {
  for (const build of [tiers[1], tiers[3]]) {
    test(`the 1.5B chooses as the reference does, on ${build.tier}, threads: ${build.threads}, in Chromium`, async () => {
      assert.ok(there(models["1.5b"].url), "./build.sh model 1.5b fetches it");
      await check(chromium, "1.5b", build, await cases("logits_15b.json"));
    });
  }
}
