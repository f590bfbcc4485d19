// Packed weights between visits: the same answers from them as from the file, within the same memory, and none when damaged.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { faultServer } from "../tools/fault_server.mjs";
import { browsers, full, model05, openBrowser, packagePage, packageSite } from "./harness.mjs";
import { attempt, damageChunk } from "./stored.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));

let site;
before(async () => {
  site = await packageSite();
});
after(() => site?.close());

/** Changes bytes of the only image, at `from` or in every 100,000 of a range; `table`: positions count from the embedding's start. */
const damageImage = async ({ from, to = from + 4096, table = 0 }) => {
  const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("qandle-images");
  for await (const entry of folder.values()) {
    const head = new Uint32Array(await (await entry.getFile()).slice(0, 24).arrayBuffer());
    const start = table && Math.ceil((64 + head[3] + head[4] + head[5]) / 64) * 64 + table;
    const file = await entry.createWritable({ keepExistingData: true });
    for (let at = from; at + 4096 <= to; at += 100_000) await file.write({ type: "write", position: start + at, data: new Uint8Array(4096).fill(77) });
    await file.close();
  }
};

// Packed weights, tokenizer and all else, KV cache: what `model.test.mjs` holds a first load to.
const memoryLimit = (tensorBytes, kvBytes) => 1.08 * tensorBytes + (48 << 20) + kvBytes;

for (const name of browsers) {
  test(`every way of loading stays within the bound of memory, and the image gives the same answer, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      const ask = async ({ path, options = {}, file = false, image = false }) => {
        const source = file ? new File([await (await fetch(path)).blob()], "m.gguf") : new URL(path, location.href).href;
        const engine = await window.qandle.load(source, { threads: 1, ...options });
        const reply = await engine.completions.create({ prompt: [9707, 11, 1879], max_tokens: 4, temperature: 0, return_tokens: true });
        const { memory, model, load } = engine.info;
        const found = { source: load.source, ids: Array.from(reply.choices[0].token_ids), wasm: memory.wasmBytes, kv: memory.kvBytes, tensors: model.bytes };
        for (let i = 0; image && i < 240 && !(await window.qandle.models.list()).some(({ imageBytes }) => imageBytes > 0); i++) await new Promise((resolve) => setTimeout(resolve, 250));
        await engine.close();
        return found;
      };
      const path = model05;
      const ways = [
        ["network", { path, image: true }],
        ["image", { path }],
        ["cache", { path, options: { fastImage: false } }],
        ["network", { path, options: { cache: "none" } }],
        ["file", { path, file: true }],
      ];
      let first;
      for (const [source, way] of ways) {
        const found = await page.run(ask, way);
        first ??= found;
        assert.equal(found.source, source);
        assert.deepEqual(found.ids, first.ids, source);
        assert.ok(found.wasm <= memoryLimit(found.tensors, found.kv), `${source}: ${found.wasm} bytes of wasm memory`);
      }
      const [row] = await page.run(() => window.qandle.models.list());
      assert.ok(row.imageBytes > row.bytes && row.imageBytes < 1.1 * row.bytes, String(row.imageBytes));

      // An image whose bytes changed is left aside, and written anew.
      await page.run(damageImage, { from: 300_000_000 });
      const mended = await page.run(ask, { path, image: true });
      assert.deepEqual([mended.source, mended.ids], ["cache", first.ids]);
      assert.equal((await page.run(ask, { path })).source, "image");
      await page.run((url) => window.qandle.models.delete(new URL(url, location.href).href), path);
      const left = await page.run(async () => {
        const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("qandle-images");
        const names = [];
        for await (const name of folder.keys()) names.push(name);
        return names;
      });
      assert.deepEqual(left, []);
    } finally {
      await browser.close();
    }
  });

  test(`an embedding that is damaged in the image is noticed before any of it is used, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      /** Asks for the ids one after another as soon as the model is loaded, and again when nothing of the image is left. */
      const visit = async ({ path, prompts, image }) => {
        const stored = async () => (await window.qandle.models.list())[0]?.imageBytes > 0;
        const until = async (wanted) => {
          for (let i = 0; i < 240 && (await stored()) !== wanted; i++) await new Promise((resolve) => setTimeout(resolve, 100));
          return await stored();
        };
        const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1 });
        const ask = (prompt) => engine.completions.create({ prompt, max_tokens: 3, temperature: 0, return_tokens: true, cache: "off" })
          .then((reply) => Array.from(reply.choices[0].token_ids).join(), (error) => error.code);
        const answers = [];
        for (const prompt of prompts) answers.push(await ask(prompt));
        const kept = await until(image);
        const again = [];
        for (const prompt of prompts) again.push(await ask(prompt));
        const { source } = engine.info.load;
        await engine.close();
        return { source, answers, again, kept };
      };
      // Packed, a block of Q8_0 (the head, which comes first) takes 36 bytes and one of Q5_0 24.
      const table = 151936 * (896 / 32) * 36;
      const bytes = 151936 * (896 / 32) * 24;
      const [low, high] = [[0, 11, 1879], [150_000, 151_000, 151_600]];
      const path = model05;
      const first = await page.run(visit, { path, prompts: [low, high], image: true });
      assert.deepEqual([first.source, first.again, first.kept], ["network", first.answers, true]);
      const [right] = [first.answers];

      // All of it, and a chunk that nobody has looked at since: known before the first question.
      await page.run(damageChunk, { chunk: 12, at: 1_000_000 });
      await page.run(damageImage, { table, from: 0, to: bytes });
      const all = await page.run(visit, { path, prompts: [high, low], image: false });
      assert.deepEqual(all, { source: "image", answers: [right[1], right[0]], again: [right[1], right[0]], kept: false });
      const rewritten = await page.run(visit, { path, prompts: [low], image: true });
      assert.deepEqual([rewritten.source, rewritten.answers, rewritten.kept], ["cache", [right[0]], true]);

      // Its end: the question that needs it may come first, and is refused; the next one is not.
      await page.run(damageImage, { table, from: 0.98 * bytes, to: bytes });
      const end = await page.run(visit, { path, prompts: [high, high, low], image: false });
      assert.ok([right[1], "integrity"].includes(end.answers[0]), end.answers[0]);
      assert.deepEqual([end.source, end.answers.slice(1), end.again], ["image", [right[1], right[0]], [right[1], right[1], right[0]]]);
    } finally {
      await browser.close();
    }
  });

  if (full) {
    test(`1.1 GB are stored and read back, ${name}`, async () => {
      const large = await faultServer({ file: `${root}models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf` });
      const browser = await openBrowser(name);
      try {
        const page = await packagePage(browser, site);
        const first = await page.run(attempt, { url: large.url, options: { fastImage: false } });
        assert.equal(first.code, "ok", first.message);
        assert.equal(large.sent, large.size);
        large.reset();
        const again = await page.run(attempt, { url: large.url, options: { fastImage: false } });
        assert.deepEqual([again.code, again.ids, again.sources, large.sent], ["ok", first.ids, ["cache"], 0], again.message);
        assert.deepEqual(await page.run((url) => window.qandle.models.verify(url), large.url), { chunks: 134, bad: 0, repaired: 0 });
      } finally {
        await browser.close();
        await large.close();
      }
    });
  }
}
