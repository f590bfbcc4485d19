// Token ids between visits: taken from the disk where they are right, and worked out anew where they are not, or not there.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { openBrowser, packagePage, packageSite } from "./harness.mjs";

const url = "/fixtures/golden/tiny-q4km_h256_untied.gguf";
const texts = ["Answer briefly, and show each step.", "鸡兔同笼，共有35个头，94只脚。", "e\u0301 <|im_start|> 'Re\n\n 42"];

let site, chromium;
before(async () => {
  [site, chromium] = await Promise.all([packageSite(), openBrowser("chromium")]);
});
after(async () => {
  await chromium?.close();
  await site?.close();
});

/** Tokenises the texts in a visit of its own, and waits until what they came to is kept. */
const visit = async ({ url, texts, options = {}, keeps = false }) => {
  const notices = [];
  const engine = await window.qandle.load(url, { threads: 1, warmup: false, ...options, onNotice: ({ code }) => notices.push(code) });
  // The record is read beside the first messages.
  await new Promise((resolve) => setTimeout(resolve, 300));
  const ids = [];
  for (const text of texts) ids.push(Array.from(await engine.tokenize(text, { special: true })));
  const counts = [];
  for (const text of texts) counts.push(await engine.countTokens(text));
  const { caches, memory } = await engine.metrics();
  if (keeps) await new Promise((resolve) => setTimeout(resolve, 1800));
  await engine.close();
  return { ids, counts, tokenizer: caches.tokenizer, tokenizerBytes: memory.tokenizerBytes, notices };
};

/** The stored record, changed by `change` (source text) where one is given. */
const record = async (change) => {
  const settled = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const db = await settled(indexedDB.open("qandle"));
  const value = await settled(db.transaction("tokens").objectStore("tokens").get("ids"));
  if (change !== undefined) {
    const changed = new Function("bytes", `return (${change})(bytes)`)(value);
    await settled(db.transaction("tokens", "readwrite").objectStore("tokens").put(changed, "ids"));
  }
  db.close();
  return value === undefined ? null : value.length;
};

test("a second visit takes ids from the disk, and damage gives the same ids all the same, chromium", async () => {
  const page = await packagePage(chromium, site);
  const first = await page.run(visit, { url, texts, keeps: true });
  assert.equal(first.tokenizer.disk.hits, 0);
  assert.ok(first.tokenizer.hits > 0 && first.tokenizer.misses > 0 && first.tokenizer.hitRate > 0);
  assert.ok((await page.run(record)) > 100);

  const second = await page.run(visit, { url, texts, keeps: true });
  assert.deepEqual([second.ids, second.counts], [first.ids, first.counts]);
  assert.equal(second.tokenizer.disk.misses, 0, JSON.stringify(second.tokenizer));
  assert.equal(second.tokenizer.disk.hitRate, 1);
  assert.equal(second.tokenizer.combinedHitRate, 1);

  const damages = [
    "(bytes) => bytes.map((byte, at) => (at % 90 === 50 ? byte ^ 4 : byte))",
    "(bytes) => bytes.slice(0, -3)",
    "() => new Uint8Array(4 << 20)",
    "() => 'something else'",
  ];
  for (const damage of damages) {
    await page.run(record, damage);
    const visited = await page.run(visit, { url, texts, keeps: true });
    assert.deepEqual([visited.ids, visited.counts, visited.notices], [first.ids, first.counts, []], damage);
    assert.ok(visited.tokenizer.disk.misses > 0, damage);
    // It was mended by the way.
    const again = await page.run(visit, { url, texts });
    assert.equal(again.tokenizer.disk.misses, 0, damage);
  }

  const none = await page.run(visit, { url, texts, options: { cache: "none" } });
  assert.deepEqual([none.ids, none.tokenizer.disk.hits], [first.ids, 0]);
  await page.run(async (url) => window.qandle.models.delete(url), new URL(url, site.url).href);
  assert.equal(await page.run(record), null, "with the last model its texts go");
  assert.deepEqual(page.faults, []);
  await page.close();
});

test("without IndexedDB the cache is in memory alone, and nothing is said of it, chromium", async () => {
  const page = await packagePage(chromium, site);
  const whole = await page.run(visit, { url, texts, options: { cache: "none", phrases: texts } });
  assert.equal(whole.tokenizer.misses, 0, "phrases are hits at once");
  await page.evaluate(() => {
    const Real = window.Worker;
    // The worker's own scope loses IndexedDB before the engine's script is imported.
    window.Worker = class extends Real {
      constructor(source, options) {
        const text = (script) => URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
        const both = [text(`Object.defineProperty(self, "indexedDB", { value: undefined });`), new URL(source, location.href)];
        // One after the other, without a pause in which the first message would find nobody.
        super(text(both.map((url) => `import ${JSON.stringify(String(url))};`).join("\n")), { ...options, type: "module" });
      }
    };
  });
  const { ids, counts, tokenizer, notices } = await page.run(visit, { url, texts, keeps: true });
  assert.deepEqual([ids, counts], [whole.ids, whole.counts]);
  assert.ok(tokenizer.hits > 0 && tokenizer.disk.hits === 0);
  // That of the weights, which cannot be kept either.
  assert.deepEqual(notices.filter((code) => code !== "no_storage"), []);
  assert.deepEqual(page.faults, []);
  await page.close();
});

test("a database of the version before gets the new table and keeps its rows, chromium", async () => {
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, site);
    await page.run(async () => {
      await new Promise((resolve, reject) => {
        const request = indexedDB.open("qandle", 1);
        request.onupgradeneeded = () => ["models", "chunks"].forEach((name) => request.result.createObjectStore(name));
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          // An older tab: it stays open, and lets go when it is asked to.
          request.result.onversionchange = () => request.result.close();
          const transaction = request.result.transaction("chunks", "readwrite");
          transaction.objectStore("chunks").put(new Blob(["abc"]), "probe-old/0");
          transaction.oncomplete = () => resolve();
        };
      });
    });
    const { notices } = await page.run(visit, { url, texts, keeps: true });
    assert.deepEqual(notices, []);
    assert.ok((await page.run(record)) > 100);
    const kept = await page.run(async () => {
      const settled = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
      const db = await settled(indexedDB.open("qandle"));
      return [db.version, await settled(db.transaction("chunks").objectStore("chunks").getAllKeys())];
    });
    assert.deepEqual(kept, [2, ["probe-old/0"]]);
  } finally {
    await browser.close();
  }
});
