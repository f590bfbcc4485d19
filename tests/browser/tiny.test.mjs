// Tiny models with known logits, on each of the four builds in Chromium: right, and the same on all of them.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { full, openBrowser, packagePage, packageSite, tiers, unpack } from "./harness.mjs";

// Widened weights in float32 beside an f16 KV cache: see the tolerances of the golden values.
const FLOAT_TYPES = new Set(["f32", "f16", "bf16"]);
const FLOAT = { maxLogit: 0.05, margin: 0.05 };
// 8-bit activations, blocks of 32 and of 256.
const BLOCK_32 = { maxLogit: 0.5, margin: 0.3 };
const BLOCK_256 = { maxLogit: 0.8, margin: 0.4 };

// The golden models' last vocabulary entries stand for no token; the reference chooses among them, an engine never does.
const GOLDEN_TOKENS = 498;

// Tokens of the tiny vocabulary: 256 bytes, 220 merges, 22 special ones.
const REAL_TOKENS = 498;

function tolerance(file) {
  const type = /^tiny-([a-z0-9_]+?)_(?:r1_|h\d+_)?(?:un)?tied/.exec(file)?.[1] ?? "";
  if (FLOAT_TYPES.has(type)) return FLOAT;
  return /^q\d_[01]$|^iq4_nl$/.test(type) ? BLOCK_32 : BLOCK_256;
}

async function cases() {
  const own = JSON.parse(await readFile(new URL("../fixtures/tiny/cases.json", import.meta.url), "utf8"));
  const list = own.cases.map(({ file, ids, argmax, margin, logits }) => ({ file, url: `/fixtures/tiny/${file}`, sequences: [{ ids, argmax, margin, last: logits.at(-1), greedy: [] }] }));
  const golden = JSON.parse(await readFile(new URL("../fixtures/golden/tiny_cases.json", import.meta.url), "utf8"));
  for (const { file, sequences } of Object.values(golden.cases)) {
    list.push({
      file,
      url: `/fixtures/golden/${file}`,
      sequences: sequences.map((s) => ({ ids: s.ids, argmax: s.argmax, margin: s.margin, last: s.last_logits, greedy: s.greedy, greedyMargin: s.greedy_margin })),
    });
  }
  return list;
}

let site, chromium, firefox, list;
before(async () => {
  [site, list] = await Promise.all([packageSite(), cases()]);
  chromium = await openBrowser("chromium");
  if (full) firefox = await openBrowser("firefox");
});
after(async () => {
  await chromium?.close();
  await firefox?.close();
  await site?.close();
});

/** Logits at every position and greedy ids of all models on one build: one page, one engine after the other. */
async function answers(browser, build) {
  const page = await packagePage(browser, site);
  const out = [];
  for (const { url, sequences } of list) {
    out.push(
      await page.run(
        async ({ url, sequences, build }) => {
          const engine = await window.qandle.load(url, { ...build, warmup: false });
          try {
            const { tier, threads } = engine.info.runtime;
            const results = [];
            for (const { ids, greedy } of sequences) {
              const all = await engine.logits(new Uint32Array(ids), { all: true });
              const reply = greedy.length === 0 ? null : await engine.completions.create({ prompt: ids, max_tokens: greedy.length, temperature: 0, return_tokens: true, cache: "off" });
              results.push({ all: window.pack(all), greedy: reply?.choices[0].token_ids ?? [] });
            }
            return { tier, threads, results };
          } finally {
            await engine.close();
          }
        },
        { url, sequences: sequences.map(({ ids, greedy }) => ({ ids, greedy })), build },
      ),
    );
  }
  assert.deepEqual(page.faults, []);
  await page.close();
  return out;
}

const first = new Map();

function check(browser, build) {
  return async () => {
    const found = await answers(browser(), build);
    for (const [i, { file, sequences }] of list.entries()) {
      const { maxLogit, margin } = tolerance(file);
      assert.equal(found[i].tier, build.tier, file);
      assert.equal(found[i].threads, build.threads, file);
      for (const [j, sequence] of sequences.entries()) {
        const all = unpack(found[i].results[j].all);
        const vocabulary = sequence.last.length;
        assert.equal(all.length, vocabulary * sequence.ids.length, `${file}: logits for each position`);
        const last = all.subarray(all.length - vocabulary);
        const worst = Math.max(...sequence.last.map((want, v) => Math.abs(want - last[v])));
        assert.ok(worst <= maxLogit, `${file}: a last logit is off by ${worst}, allowed ${maxLogit}`);
        for (const [t, want] of sequence.argmax.entries()) {
          if (sequence.margin[t] < margin) continue;
          const row = all.subarray(t * vocabulary, (t + 1) * vocabulary);
          assert.equal(row.indexOf(Math.max(...row)), want, `${file}: best token at position ${t}`);
        }
        const until = sequence.greedy.findIndex((id, step) => sequence.greedyMargin[step] < margin || id >= GOLDEN_TOKENS);
        const sure = until < 0 ? sequence.greedy.length : until;
        assert.deepEqual(found[i].results[j].greedy.slice(0, sure), sequence.greedy.slice(0, sure), `${file}: greedy ids`);
        // The same everywhere: logits bit for bit, and greedy ids beyond where the reference is sure.
        const key = `${file} ${j}`;
        if (!first.has(key)) first.set(key, found[i].results[j]);
        assert.ok(found[i].results[j].all === first.get(key).all, `${file}: logits differ from those of the first build`);
        assert.deepEqual(found[i].results[j].greedy, first.get(key).greedy, `${file}: greedy ids differ from those of the first build`);
      }
    }
  };
}

for (const build of tiers) {
  test(`tiny models have the reference's logits and greedy ids on ${build.tier}, threads: ${build.threads}, in Chromium`, check(() => chromium, build));
  if (full) test(`tiny models answer the same on ${build.tier}, threads: ${build.threads}, in Firefox`, check(() => firefox, build));
}
