// The start without a network: after one visit the page opens and answers with its server gone, a new version waits until it
// is asked for, and the page works where there are no service workers.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { cp, mkdir, mkdtemp, readdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";
import { defaultMounts } from "../tools/serve.mjs";
import { storedNames } from "./stored.mjs";
import { browsers, openBrowser, pageSite } from "./harness.mjs";

const LOAD_MS = 300_000;
const ANSWER_MS = 300_000;
const root = fileURLToPath(new URL("../../", import.meta.url));
// A random model whose words mean nothing; a short context ends its answers.
const tinyQuery = "?autoload=1&model=/tiny/r1-tiny.gguf&context=256";

let folder;
before(async () => {
  folder = await mkdtemp(path.join(os.tmpdir(), "qandle-offline-"));
  await mkdir(path.join(folder, "tiny"));
  const packed = await readFile(path.join(root, "tests/fixtures/golden/r1-tiny.gguf.gz"));
  await writeFile(path.join(folder, "tiny/r1-tiny.gguf"), gunzipSync(packed));
  await makeOtherVersion(defaultMounts["/"], path.join(folder, "other"));
});
after(() => rm(folder, { recursive: true, force: true, maxRetries: 5 }));

/** The built page as if every file had changed: other names, another title. */
async function makeOtherVersion(from, to) {
  await cp(from, to, { recursive: true });
  const assets = path.join(to, "assets");
  const names = (await readdir(assets)).map((name) => [name, name.replace(/(\.\w+)$/, "-other$1")]);
  for (const [name, other] of names) await rename(path.join(assets, name), path.join(assets, other));
  const md5 = (text) => createHash("md5").update(text).digest("hex");
  const renamed = (text) => names.reduce((text, [name, other]) => text.replaceAll(name, other), text);
  const html = await readFile(path.join(to, "index.html"), "utf8");
  const otherHtml = renamed(html).replace("<title>Qandle</title>", "<title>Other</title>");
  const sw = await readFile(path.join(to, "sw.js"), "utf8");
  assert.ok(sw.includes(md5(html)), "the service worker lists index.html by its hash");
  await writeFile(path.join(to, "index.html"), otherHtml);
  await writeFile(path.join(to, "sw.js"), renamed(sw).replace(md5(html), md5(otherHtml)));
  for (const [, other] of names.filter(([name]) => /\.(js|css)$/.test(name))) {
    const file = path.join(assets, other);
    await writeFile(file, renamed(await readFile(file, "utf8")));
  }
}

async function state(page, wanted, timeout) {
  const settled = (states) => states.includes(document.documentElement.dataset.state);
  await page.waitForFunction(settled, { timeout, polling: 200 }, [wanted, "error"]);
  const found = await page.evaluate(() => [document.documentElement.dataset.state, document.body.innerText]);
  assert.equal(found[0], wanted, found[1]);
}

/** Opens the page, waits until its model is loaded, asks, and waits for the whole answer. */
async function visit(browser, url, question = "What is the capital of France? Answer in one sentence.") {
  const page = await browser.open(url);
  await state(page, "ready", LOAD_MS);
  return { page, answer: await ask(page, question) };
}

/** Asks the first question of a chat. */
async function ask(page, question) {
  await page.type("#prompt", question);
  await page.click("#send");
  await page.waitForSelector(".message.assistant > .detail, .message.error", { timeout: ANSWER_MS });
  await state(page, "ready", ANSWER_MS);
  return page.$$eval(".message.assistant", (nodes) => nodes.at(-1).textContent);
}

/** Every URL in the Cache API, by bucket. */
const kept = (page) =>
  page.evaluate(async () => {
    const buckets = {};
    for (const name of await caches.keys()) buckets[name] = (await (await caches.open(name)).keys()).map(({ url }) => url);
    return buckets;
  });

const filesOf = (buckets) => Object.values(buckets).flat();

for (const name of browsers) {
  test(`after one visit the page starts and answers without its server, ${name}`, async () => {
    const profile = await mkdtemp(path.join(folder, `${name}-`));
    const mounts = { ...defaultMounts };
    const site = await pageSite({ mounts });
    let browser = await openBrowser(name, { profile });
    try {
      const first = await visit(browser, `${site.url}/?autoload=1`);
      assert.match(first.answer, /Paris/);
      assert.deepEqual(first.page.faults, []);
      await first.page.close();

      // The server no longer has the model: what is kept is enough.
      mounts["/models/"] = path.join(folder, "nothing");
      const second = await browser.open(`${site.url}/?autoload=1`);
      await state(second, "ready", LOAD_MS);
      await second.close();
      await browser.close();
      await site.close();
      await assert.rejects(fetch(`${site.url}/`), "the server is gone");

      browser = await openBrowser(name, { profile });
      const { page, answer } = await visit(browser, `${site.url}/?autoload=1`);
      assert.match(answer, /Paris/);
      assert.equal(await page.evaluate(() => crossOriginIsolated), true, "the stored page is cross-origin isolated");
      assert.equal(await page.$eval("#fact-threads", (node) => /\d+ thread/.test(node.textContent)), true);
      assert.equal(await page.$eval("#update", (node) => node.hidden), true, "nothing is new");

      assert.equal((await page.evaluate(storedNames)).file.length, 1);
      const files = filesOf(await kept(page));
      assert.deepEqual(files.filter((url) => /\.gguf|\/models\//.test(url)), [], "the service worker keeps no model");
      const builds = files.filter((url) => /qandle_(simd128|relaxed)[^/]*\.wasm$/.test(url));
      assert.equal(builds.length, 2, `one instruction set, with threads and without: ${builds}`);
      await page.close();
    } finally {
      await browser.close();
      await site.close().catch(() => {});
    }
  });

  test(`a new version waits until it is asked for, then starts without a network too, ${name}`, async () => {
    const mounts = { ...defaultMounts, "/tiny/": path.join(folder, "tiny") };
    const site = await pageSite({ mounts });
    const browser = await openBrowser(name);
    try {
      // An instruction set of the user's choice, not the one that is kept anyway: it is fetched again beside the chat.
      const url = `${site.url}/${tinyQuery}&tier=simd128`;
      const first = await visit(browser, url);
      await first.page.waitForFunction(
        async () => {
          const buckets = await Promise.all((await caches.keys()).map(async (name) => (await caches.open(name)).keys()));
          return buckets.flat().filter(({ url }) => /qandle_simd128[^/]*\.wasm$/.test(url)).length === 2;
        },
        { timeout: 60_000, polling: 200 },
      );
      await first.page.close();

      mounts["/"] = path.join(folder, "other");
      const { page } = await visit(browser, url);
      assert.equal(await page.title(), "Qandle", "the version that was kept is shown");
      await page.evaluate(() => { window.mark = "same"; });
      await page.waitForSelector("#update", { visible: true, timeout: 60_000 });
      const fetched = filesOf(await kept(page)).filter((url) => /qandle_simd128[^/]*-other\.wasm$/.test(url));
      assert.equal(fetched.length, 2, "the new version has what the old one used before it is offered");
      await page.click("#new-chat");
      await ask(page, "And then?");
      assert.equal(await page.evaluate(() => window.mark), "same", "the page was not reloaded");
      await page.click("#reload");
      await page.waitForFunction(() => document.title === "Other", { timeout: 60_000, polling: 200 });
      await state(page, "ready", LOAD_MS);
      assert.equal((await page.evaluate(storedNames)).file.length, 1, "the weights are left alone");
      const assets = filesOf(await kept(page)).filter((url) => url.includes("/assets/"));
      assert.deepEqual(assets.filter((url) => !/-other\.\w+$/.test(url)), [], "the old version's files are gone");
      await page.close();

      await site.close();
      const again = await visit(browser, url);
      assert.equal(await again.page.title(), "Other");
      await again.page.close();
    } finally {
      await browser.close();
      await site.close().catch(() => {});
    }
  });
}

test("a new version is there when the page is opened again", async () => {
  const mounts = { ...defaultMounts };
  const site = await pageSite({ mounts });
  const browser = await openBrowser("chromium");
  try {
    const first = await browser.open(`${site.url}/`);
    await first.evaluate(() => navigator.serviceWorker.ready.then(() => true));
    await first.close();
    mounts["/"] = path.join(folder, "other");
    const second = await browser.open(`${site.url}/`);
    assert.equal(await second.title(), "Qandle");
    await second.waitForSelector("#update", { visible: true, timeout: 60_000 });
    await second.close();
    const third = await browser.open(`${site.url}/`);
    assert.equal(await third.title(), "Other");
    assert.equal(await third.$eval("#update", (node) => node.hidden), true);
    assert.deepEqual(third.faults, []);
  } finally {
    await browser.close();
    await site.close();
  }
});

test("where there are no service workers the page works, with its server", async () => {
  const site = await pageSite({ mounts: { ...defaultMounts, "/tiny/": path.join(folder, "tiny") } });
  const browser = await openBrowser("chromium", { args: ["--host-resolver-rules=MAP insecure.test 127.0.0.1"] });
  try {
    const { page } = await visit(browser, `${site.url.replace("localhost", "insecure.test")}/${tinyQuery}`);
    assert.equal(await page.evaluate(() => "serviceWorker" in navigator), false);
    await page.close();
  } finally {
    await browser.close();
    await site.close();
  }
});
