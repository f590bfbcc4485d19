// Weights between visits: downloaded once, taken up where a download ended, verified, and never the wrong ones.
import assert from "node:assert/strict";
import { readFile, stat } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { faultServer } from "../tools/fault_server.mjs";
import { attempt, damageChunk, listed, storedNames } from "./stored.mjs";
import { browsers, full, model05, openBrowser, packagePage, packageSite } from "./harness.mjs";

const CHUNK = 8 << 20;
const root = fileURLToPath(new URL("../../", import.meta.url));
const big = `${root}${model05.slice(1)}`;
const small = `${root}tests/fixtures/golden/tiny-q4km_h256_untied.gguf`;

let site, faulty, tiny;
before(async () => {
  site = await packageSite();
  faulty = await faultServer({ file: big });
  tiny = await faultServer({ file: small });
});
after(async () => {
  await faulty?.close();
  await tiny?.close();
  await site?.close();
});

for (const name of browsers) {
  test(`a second visit needs no network, and a changed byte is found and mended, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      faulty.reset();
      const page = await packagePage(browser, site);
      const first = await page.run(attempt, { url: faulty.url });
      assert.equal(first.code, "ok", first.message);
      assert.ok(first.rising);
      assert.deepEqual(first.sources, ["network"]);
      assert.equal(faulty.sent, faulty.size, "every byte was sent once");
      const [row] = await page.run(listed);
      assert.deepEqual(row, { source: faulty.url, bytes: faulty.size, storedBytes: faulty.size, complete: true });

      faulty.reset();
      const second = await page.run(attempt, { url: faulty.url });
      assert.deepEqual({ ...second, ms: 0 }, { code: "ok", ids: first.ids, ms: 0, notices: [], sources: ["cache"], rising: true });
      assert.equal(faulty.sent, 0, "nothing was asked of the server");

      // Four kilobytes of the seventh chunk, behind the store's back.
      const damage = () => page.run(damageChunk, { chunk: 6, at: 1_000_000 });
      assert.equal(await damage(), 1);
      const mended = await page.run(async (url) => {
        let told;
        const repaired = new Promise((resolve) => { told = resolve; });
        const engine = await window.qandle.load(url, { threads: 1, onNotice: told });
        const notice = await repaired;
        const reply = await engine.completions.create({ prompt: [1, 2, 3], max_tokens: 4, temperature: 0, return_tokens: true });
        await engine.close();
        return { code: notice.code, detail: notice.detail, ids: Array.from(reply.choices[0].token_ids) };
      }, faulty.url);
      assert.deepEqual(mended, { code: "repaired", detail: { bad: 1, repaired: 1 }, ids: first.ids });
      assert.equal(faulty.sent, CHUNK, "only that chunk was asked for");

      await damage();
      faulty.reset();
      assert.deepEqual(await page.run((url) => window.qandle.models.verify(url), faulty.url), { chunks: 59, bad: 1, repaired: 1 });
      assert.equal(faulty.sent, CHUNK);
      assert.equal(await page.run((url) => window.qandle.models.has(url), faulty.url), true);
      await page.run((url) => window.qandle.models.delete(url), faulty.url);
      assert.deepEqual(await page.run(listed), []);
      assert.deepEqual(await page.run(storedNames), { file: [], indexeddb: [], cache: [], images: [] });
      await page.close();
    } finally {
      await browser.close();
    }
  });

  test(`a download that ended at half is taken up there, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const half = Math.floor(faulty.size / 2);
      for (const how of ["server", "page", "worker", "offline"]) {
        const page = await packagePage(browser, site);
        faulty.reset(how === "server" ? { total: half } : { slow: 6 });
        if (how === "server") {
          const cut = await page.run(attempt, { url: faulty.url });
          assert.equal(cut.code, "network", cut.message);
          assert.ok(cut.message.includes(faulty.url));
        } else {
          await page.run(() => {
            window.workers = [];
            window.Worker = class extends Worker { constructor(...all) { super(...all); window.workers.push(this); } };
          });
          const load = page.run(attempt, { url: faulty.url }).catch(() => ({ code: "closed" }));
          while (faulty.sent < half) await new Promise((resolve) => setTimeout(resolve, 20));
          if (how === "offline") {
            // Firefox cannot be cut off from here, so there the server says no more.
            if (name === "chromium") await page.setOfflineMode(true);
            else faulty.plan = { status: 503 };
          }
          if (how === "worker") {
            await page.run(() => window.workers[0].terminate());
            assert.equal((await load).code, "worker_died");
          }
        }
        const other = await packagePage(browser, site);
        await page.close();
        const before = faulty.sent;
        faulty.reset();
        const again = await other.run(attempt, { url: faulty.url });
        assert.equal(again.code, "ok", again.message);
        // Two chunks of 8 MiB are on their way at a time; what the server has sent may lie in the buffers of four sockets.
        const most = faulty.size - before + 2 * CHUNK + 8e6;
        assert.ok(faulty.sent <= most, `${how}: ${faulty.sent} bytes were sent again, at most ${most} may be`);
        await other.run((url) => window.qandle.models.delete(url), faulty.url);
        await other.close();
      }
      if (name === "chromium") {
        // What the host said of the file's hash when the download began holds to its end.
        const page = await packagePage(browser, site);
        faulty.reset({ total: half, linked: "0".repeat(64) });
        assert.equal((await page.run(attempt, { url: faulty.url })).code, "network");
        faulty.reset();
        assert.equal((await page.run(attempt, { url: faulty.url })).code, "integrity");
        assert.equal((await page.run(attempt, { url: faulty.url })).code, "ok");
      }
    } finally {
      await browser.close();
    }
  });
}

// Mostly waiting: for what is silent, and before what failed is tried again. So the browsers run beside each other.
test("what a server may do wrong is a typed error that is not kept, or no fault at all", { concurrency: true }, async (t) => {
  const run = (name) => t.test(name, async () => {
    const browser = await openBrowser(name);
    const tiny = await faultServer({ file: small });
    try {
      const page = await packagePage(browser, site);
      const html = "<!doctype html><title>Sign in</title>";
      const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 491400064\n";
      const cases = [
        ["not found", { status: 404, body: "no" }, "http_status"],
        ["a page", { status: 200, type: "text/html", body: html }, "not_a_model"],
        ["a pointer", { status: 200, body: pointer }, "not_a_model"],
        ["busy once", { status: 503, times: 1 }, "ok"],
        ["cut once", { cutAfter: 100_000, times: 1 }, "ok"],
        ["always cut", { cutAfter: 100_000 }, "network"],
        ["no ranges", { noRanges: true }, "ok"],
        ["no length", { noRanges: true, noLength: true }, "ok"],
        ["compressed", { gzip: true }, "ok"],
        ["nothing exposed", { hidden: true }, "ok"],
        ["refused by CORS", { noCors: true }, "network"],
        ["slow", { slow: 30 }, "ok"],
        ["silent once", { stallAfter: 100_000, times: 1 }, "ok"],
        ["bytes missing at the end", { short: 1000, times: 1 }, "ok"],
        ["bytes always missing at the end", { short: 1000 }, "network"],
        ["zeros at the end", { zeros: 100_000 }, "integrity"],
        ["an absurd length", { claim: "1000000000000000000" }, "ok"],
        ["always cut, without ranges", { noRanges: true, cutAfter: 100_000 }, "network"],
        ...(full ? [["no answer once", { mute: true, times: 1 }, "ok"]] : []),
      ];
      for (const [what, plan, code] of cases) {
        tiny.reset(plan);
        const found = await page.run(attempt, { url: tiny.url, ask: false });
        assert.equal(found.code, code, `${what}: ${found.message}`);
        if (code !== "ok") assert.ok(found.message.includes(tiny.url), `${what}: ${found.message}`);
        if (code !== "ok") assert.deepEqual((await page.run(listed)).filter(({ complete }) => complete), [], what);
        tiny.reset();
        const good = await page.run(attempt, { url: tiny.url, ask: false });
        assert.equal(good.code, "ok", `after "${what}": ${good.message}`);
        if (code === "ok") assert.equal(tiny.sent, 0, `"${what}" was kept`);
        await page.run((url) => window.qandle.models.delete(url), tiny.url);
      }
      // A promise about the bytes that they do not keep, and one that they keep.
      tiny.reset();
      const wrong = await page.run(attempt, { url: { url: tiny.url, sha256: "0".repeat(64) } });
      assert.equal(wrong.code, "integrity", wrong.message);
      assert.deepEqual(await page.run(listed), []);
      await page.close();
    } finally {
      await browser.close();
      await tiny.close();
    }
  });
  await Promise.all(browsers.map(run));
});

for (const name of browsers) {
  // Firefox takes a minute and a half.
  if (full || name === "chromium") test(`another file under the same URL is read anew, and ranges that are no longer served too, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      for (const plan of [{ etag: '"two"' }, { etag: '"two"', noRanges: true }, { shrunk: 50e6, times: 4 }, { noRanges: true }, { long: 1000 }]) {
        faulty.reset({ total: 60e6 });
        assert.equal((await page.run(attempt, { url: faulty.url, ask: false })).code, "network");
        faulty.reset(plan);
        const found = await page.run(attempt, { url: faulty.url });
        assert.equal(found.code, "ok", `${JSON.stringify(plan)}: ${found.message}`);
        if (plan.etag !== undefined) assert.ok(faulty.sent >= faulty.size, "all of it was asked for");
        assert.deepEqual((await page.run(listed)).map(({ complete }) => complete), [true], JSON.stringify(plan));
        await page.run((url) => window.qandle.models.delete(url), faulty.url);
      }
      await page.close();
    } finally {
      await browser.close();
    }
  });

  test(`where a store is missing or refuses, another holds the bytes, or memory and one notice, ${name}`, async () => {
    const worker = await readFile(`${root}pkg/dist/worker.js`, "utf8");
    let patch = "";
    const patched = await packageSite({
      onRequest: ({ url }, response, headers) => {
        if (!url.startsWith("/pkg/worker.js")) return false;
        response.writeHead(200, { ...headers, "Content-Type": "text/javascript" });
        response.end(`${patch}\n${worker}`);
        return true;
      },
    });
    const browser = await openBrowser(name);
    try {
      const noFiles = "StorageManager.prototype.getDirectory = undefined;";
      const noBlobs = "{ const put = IDBObjectStore.prototype.put; IDBObjectStore.prototype.put = function (value, key) { if (value instanceof Blob) throw new DOMException('no', 'DataCloneError'); return put.call(this, value, key); }; }";
      const hide = (what, value) => `Object.defineProperty(self, "${what}", { get() { ${value} } });`;
      const cases = [
        ["no file system", noFiles, "indexeddb"],
        ["a file system that refuses", "StorageManager.prototype.getDirectory = async () => { throw new DOMException('no', 'SecurityError'); };", "indexeddb"],
        ["nor Blobs in IndexedDB", noFiles + noBlobs, "cache"],
        ["nor a Cache API", noFiles + noBlobs + hide("caches", "return undefined"), undefined],
        ["nor one that opens", noFiles + noBlobs + hide("caches", "return { open: async () => { throw new DOMException('no', 'SecurityError'); } }"), undefined],
        ["no IndexedDB", hide("indexedDB", "return undefined"), undefined],
        ["an IndexedDB that throws", hide("indexedDB", "throw new DOMException('no', 'SecurityError')"), undefined],
      ];
      for (const [what, code, place] of cases) {
        const [notices, again] = place === undefined ? [["no_storage"], tiny.size] : [[], 0];
        patch = code;
        const page = await packagePage(browser, patched);
        for (const sent of [tiny.size, again]) {
          tiny.reset();
          const found = await page.run(attempt, { url: tiny.url, ask: false });
          assert.deepEqual([found.code, found.notices, tiny.sent], ["ok", notices, sent], `${what}: ${found.message}`);
        }
        const { images, ...chunks } = await page.run(storedNames);
        assert.deepEqual(Object.keys(chunks).filter((name) => chunks[name].length > 0), place === undefined ? [] : [place], what);
        await page.run((url) => window.qandle.models.delete(url), tiny.url);
        await page.close();
      }
    } finally {
      await browser.close();
      await patched.close();
    }
  });
}

test("a model that is deleted while another tab loads it stays deleted, and the load goes on", async () => {
  const browser = await openBrowser("chromium");
  try {
    faulty.reset({ slow: 2 });
    const pages = [await packagePage(browser, site), await packagePage(browser, site)];
    const load = pages[0].run(attempt, { url: faulty.url });
    while (faulty.sent < 60e6) await new Promise((resolve) => setTimeout(resolve, 20));
    await pages[1].run((url) => window.qandle.models.delete(url), faulty.url);
    assert.equal((await load).code, "ok");
    assert.deepEqual(await pages[1].run(listed), []);
    assert.equal(await pages[1].run((url) => window.qandle.models.has(url), faulty.url), false);
    assert.deepEqual(await pages[1].run(storedNames), { file: [], indexeddb: [], cache: [], images: [] });
  } finally {
    await browser.close();
  }
});

test("weights that were read from a damaged chunk are read anew, whoever mended it and whenever", async () => {
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, site);
    /** Loads, lets `meanwhile` happen, and asks until the answer is `want`. */
    const heals = async ({ url, want, verify = false }) => {
      const engine = await window.qandle.load(url, { threads: 1 });
      const ask = async () => Array.from((await engine.completions.create({ prompt: [1, 2, 3], max_tokens: 4, temperature: 0, return_tokens: true, cache: "off" })).choices[0].token_ids).join();
      const first = await ask();
      if (verify) await window.qandle.models.verify(url);
      const begun = performance.now();
      let last = first;
      while (last !== want && performance.now() - begun < 20_000) {
        await new Promise((resolve) => setTimeout(resolve, 300));
        last = await ask();
      }
      const image = (await window.qandle.models.list())[0].imageBytes;
      await engine.close();
      return { wrong: first !== want, healed: last === want, image };
    };
    faulty.reset();
    const want = (await page.run(attempt, { url: faulty.url, options: { cache: "none" } })).ids.join();
    const damaged = () => page.run(damageChunk, { chunk: 12, at: 1_000_000 });
    const spoilt = { wrong: true, healed: true, image: 0 };

    // Of a download that is taken up, the chunks that were there.
    faulty.reset({ total: 200e6 });
    assert.equal((await page.run(attempt, { url: faulty.url })).code, "network");
    faulty.reset();
    await damaged();
    assert.deepEqual(await page.run(heals, { url: faulty.url, want }), spoilt);
    // Mended by another between the load and the look at what is kept.
    await damaged();
    assert.deepEqual(await page.run(heals, { url: faulty.url, want, verify: true }), spoilt);
    // What cannot be mended becomes no image.
    await damaged();
    faulty.plan = { status: 503 };
    const away = await page.run(async (url) => {
      let told;
      const notice = new Promise((resolve) => { told = resolve; });
      const engine = await window.qandle.load(url, { threads: 1, onNotice: told });
      const { detail } = await notice;
      await new Promise((resolve) => setTimeout(resolve, 2000));
      const [{ imageBytes }] = await window.qandle.models.list();
      await engine.close();
      return { detail, imageBytes };
    }, faulty.url);
    assert.deepEqual(away, { detail: { bad: 1, repaired: 0 }, imageBytes: 0 });
    await page.run((url) => window.qandle.models.delete(url), faulty.url);
    assert.deepEqual(await page.run(storedNames), { file: [], indexeddb: [], cache: [], images: [] });
  } finally {
    await browser.close();
  }
});

test("two tabs that load the same model share one download", async () => {
  const browser = await openBrowser("chromium");
  try {
    faulty.reset();
    const pages = [await packagePage(browser, site), await packagePage(browser, site)];
    const found = await Promise.all(pages.map((page) => page.run(attempt, { url: faulty.url })));
    assert.deepEqual(found.map(({ code }) => code), ["ok", "ok"]);
    assert.deepEqual(found[0].ids, found[1].ids);
    assert.equal(faulty.sent, faulty.size, "every byte was sent once");
  } finally {
    await browser.close();
  }
});

test("a server that answers two requests at a time is asked for no more than that, after some refusals", async () => {
  const browser = await openBrowser("chromium");
  try {
    faulty.reset({ atOnce: 2 });
    const page = await packagePage(browser, site);
    const found = await page.run(attempt, { url: faulty.url, options: { cache: "none" } });
    assert.equal(found.code, "ok", found.message);
    assert.ok(faulty.refused > 0 && faulty.refused < 20, `${faulty.refused} of ${faulty.answers} were refused`);
  } finally {
    await browser.close();
  }
});

test("two loads of the same model in one page share one download", async () => {
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, site);
    tiny.reset({ slow: 50 });
    const found = await Promise.all([page.run(attempt, { url: tiny.url }), page.run(attempt, { url: tiny.url })]);
    assert.deepEqual(found.map(({ code }) => code), ["ok", "ok"]);
    assert.deepEqual(found[0].ids, found[1].ids);
    assert.deepEqual(found.map(({ sources }) => sources).sort(), [["cache"], ["network"]]);
    assert.equal(tiny.sent, tiny.size, "every byte was sent once");
  } finally {
    await browser.close();
  }
});

test("the next mirror is asked while one fails, and what a mirror gave is there when it is gone", async () => {
  const browser = await openBrowser("chromium");
  const second = await faultServer({ file: small });
  try {
    const page = await packagePage(browser, site);
    const load = (...servers) => page.run(attempt, { url: "hf:owner/repo/m.gguf", options: { mirrors: { hf: servers.map(({ url }) => new URL("/", url).href) } } });
    for (const plan of [{ status: 503 }, { status: 404 }, { cutAfter: 100_000 }, { status: 200, type: "text/html", body: "<p>Sign in" }]) {
      tiny.reset(plan);
      second.reset();
      const found = await load(tiny, second);
      assert.equal(found.code, "ok", `${JSON.stringify(plan)}: ${found.message}`);
      assert.equal(second.sent, second.size);
      for (const { source } of await page.run(listed)) await page.run((url) => window.qandle.models.delete(url), source);
    }
    tiny.reset();
    second.reset({ status: 503 });
    assert.equal((await load(tiny, second)).code, "ok");
    tiny.reset({ status: 503 });
    assert.equal((await load(tiny, second)).code, "ok");
    assert.deepEqual([tiny.sent, second.sent], [0, 0]);
    // What one mirror gave is the same file at the other.
    second.reset();
    assert.equal((await load(second)).code, "ok");
    assert.equal(second.sent, 0);
  } finally {
    await second.close();
    await browser.close();
  }
});

test("whether the storage is kept for good is told truly", async () => {
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, site);
    const told = () => page.run(async () => [(await window.qandle.models.storage()).persisted, await navigator.storage.persisted()]);
    assert.deepEqual(await told(), [false, false]);
    await browser.browser.defaultBrowserContext().overridePermissions(site.url, ["persistent-storage"]);
    tiny.reset();
    assert.equal((await page.run(attempt, { url: tiny.url })).code, "ok");
    assert.deepEqual(await told(), [true, true], "a load has asked for it");
  } finally {
    await browser.close();
  }
});

test("a store that is too small, or none, means running from memory and one notice", async () => {
  const { size } = await stat(big);
  const browser = await openBrowser("chromium", { args: ["--host-resolver-rules=MAP insecure.test 127.0.0.1"] });
  try {
    const page = await packagePage(browser, site);
    const session = await page.createCDPSession();
    await session.send("Storage.overrideQuotaForOrigin", { origin: site.url, quotaSize: 50e6 });
    faulty.reset();
    const found = await page.run(attempt, { url: faulty.url });
    assert.deepEqual([found.code, found.notices], ["ok", ["quota"]], found.message);
    assert.equal(faulty.sent, size);
    assert.deepEqual([await page.run(listed), await page.run(storedNames)], [[], { file: [], indexeddb: [], cache: [], images: [] }]);
    await session.send("Storage.overrideQuotaForOrigin", { origin: site.url });

    // What is kept stays readable, and can be deleted, where nothing more can be written.
    tiny.reset();
    assert.equal((await page.run(attempt, { url: tiny.url })).code, "ok");
    await session.send("Storage.overrideQuotaForOrigin", { origin: site.url, quotaSize: 1000 });
    tiny.reset({ status: 503 });
    const full = await page.run(attempt, { url: tiny.url });
    assert.deepEqual([full.code, full.notices, tiny.answers], ["ok", [], 0], full.message);
    await page.run((url) => window.qandle.models.delete(url), tiny.url);
    assert.deepEqual([await page.run(listed), await page.run(storedNames)], [[], { file: [], indexeddb: [], cache: [], images: [] }]);
    await session.send("Storage.overrideQuotaForOrigin", { origin: site.url });
    await page.close();

    // An insecure page has no file system and no Cache API: IndexedDB holds the bytes.
    const insecure = await packageSite({ isolated: false });
    const open = await packagePage(browser, { url: insecure.url.replace("localhost", "insecure.test") });
    assert.equal(await open.evaluate(() => "caches" in window), false);
    tiny.reset();
    const kept = await open.run(attempt, { url: tiny.url });
    assert.equal(kept.code, "ok", kept.message);
    tiny.reset();
    const again = await open.run(attempt, { url: tiny.url });
    assert.deepEqual([again.code, again.ids, tiny.sent], ["ok", kept.ids, 0]);
    await open.close();
    await insecure.close();
  } finally {
    await browser.close();
  }
});

test("an estimate reads the header alone", async () => {
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, site);
    faulty.reset();
    const found = await page.run((url) => window.qandle.models.estimate(url, { contextLength: 4096 }), faulty.url);
    assert.ok(faulty.sent <= CHUNK, `${faulty.sent} bytes were sent`);
    assert.equal(found.downloadBytes, faulty.size);
    assert.equal(found.fits, true);
    assert.ok(found.parameters > 400e6 && found.parameters < 700e6, String(found.parameters));
    assert.ok(found.peakBytes > 490e6 && found.peakBytes < 700e6, String(found.peakBytes));
    const all = await page.run(() => window.qandle.models.storage());
    assert.ok(all.quotaBytes > 0 && all.persisted === false);
    await page.close();
  } finally {
    await browser.close();
  }
});
