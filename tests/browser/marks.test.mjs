// A tab that is killed without a word, while a model loads or answers: the next visit is told of it and goes lower. A tab
// that ends in any other way, or lives on, is none of that.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { after, before, test } from "node:test";
import { faultServer } from "../tools/fault_server.mjs";
import { full, openBrowser, packagePage, packageSite, pageSite } from "./harness.mjs";

const WAIT_MS = 20_000;
const SLOW = { slow: 400 };
const told = ["tab_was_killed", "stepped_down"];

let folder, site, faulty;
before(async () => {
  // The tiny model, as one that was made for a long context: a step is to be seen in it.
  const tiny = await readFile(new URL("../fixtures/golden/tiny-q4km_h256_untied.gguf", import.meta.url));
  const key = "qwen2.context_length";
  tiny.writeUInt32LE(32768, tiny.indexOf(key) + key.length + 4);
  folder = await mkdtemp(path.join(os.tmpdir(), "qandle-marks-"));
  await writeFile(path.join(folder, "model.gguf"), tiny);
  site = await packageSite();
  faulty = await faultServer({ file: path.join(folder, "model.gguf") });
});
after(async () => {
  await faulty?.close();
  await site?.close();
  if (folder !== undefined) await rm(folder, { recursive: true, force: true });
});

async function withBrowser(name, run) {
  const browser = await openBrowser(name);
  try {
    await run(browser);
  } finally {
    await browser.close();
  }
}

/** Begins a load in the page; what is told of it stands in `window.seen`. */
const begin = ({ url, options = {} }) => {
  const seen = { codes: [], details: [], workers: 0, phases: new Set(), end: null, engine: null };
  const Real = window.Worker;
  window.Worker = class extends Real {
    constructor(...all) {
      super(...all);
      seen.workers++;
    }
  };
  window.halt ??= new AbortController();
  window.seen = seen;
  window.qandle
    .load(url, {
      cache: "none",
      signal: window.halt.signal,
      ...options,
      onNotice: ({ code, detail }) => { seen.codes.push(code); seen.details.push(detail); },
      onProgress: ({ phase }) => seen.phases.add(phase),
    })
    .then((engine) => Object.assign(seen, { engine, end: "ok" }), (error) => { seen.end = error.code ?? error.name; })
    .finally(() => { window.Worker = Real; });
};

const seen = (page) => page.run(() => {
  const { codes, details, workers, end, engine } = window.seen;
  return { codes, details, workers, end, contextLength: engine?.info.contextLength };
});

const marks = (page) => page.run(() =>
  Object.entries(localStorage).filter(([key]) => key.startsWith("qandle.mark.")).map(([, text]) => JSON.parse(text).value));

const phaseOf = async (page) => (await marks(page)).find(({ kind }) => kind === "phase")?.phase;

async function until(what, check) {
  const end = Date.now() + WAIT_MS;
  while (!(await check())) {
    if (Date.now() > end) throw new Error(`not within ${WAIT_MS} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** A page in the middle of a load. */
async function loading(browser, options) {
  faulty.reset(SLOW);
  const page = await packagePage(browser, site);
  await page.run(begin, { url: faulty.url, options });
  await until("the worker has been made", async () => (await seen(page)).workers > 0);
  await until("the load is marked", async () => ["plan", "download", "load"].includes(await phaseOf(page)));
  return page;
}

/** A load to its end. */
async function loaded(browser, options) {
  faulty.reset();
  const page = await packagePage(browser, site);
  await page.run(begin, { url: faulty.url, options });
  await until("the load ends", async () => (await seen(page)).end !== null);
  return page;
}

const answer = (page) => page.run(async () => {
  const reply = await window.seen.engine.completions.create({ prompt: [1, 2, 3], max_tokens: 2, temperature: 0 });
  await window.seen.engine.close();
  return reply.choices.length;
});

/** The tab's process ends at once, as when the system takes its memory. */
async function crash(page) {
  const session = await page.createCDPSession();
  const gone = new Promise((resolve) => page.once("error", resolve));
  session.send("Page.crash").catch(() => {});
  await gone;
  await page.close().catch(() => {});
}

test("each silent death while loading takes the next load a step down, and an answer keeps the step, chromium", () =>
  withBrowser("chromium", async (browser) => {
    // Of two threads one is the engine's worker itself.
    const expected = [[[], 2, undefined], [told, 1, 4096], [told, 1, 2048]];
    for (const [codes, workers, contextLength] of expected) {
      const page = await loading(browser, { threads: "auto" });
      const found = await seen(page);
      assert.deepEqual([found.codes, found.workers, found.details[1]?.contextLength], [codes, workers, contextLength]);
      for (const { source } of found.details) assert.equal(source, faulty.url);
      if (found.codes.length > 0) assert.ok(["plan", "download", "load"].includes(found.details[0].phase));
      await crash(page);
    }
    const third = await loaded(browser);
    const low = await seen(third);
    assert.deepEqual([low.end, low.codes, low.workers, low.contextLength], ["ok", told, 1, 1024]);
    const [{ inARow, at }, { threads, contextLength, cause, from }] = low.details;
    assert.equal(inARow, 3);
    assert.ok(Math.abs(Date.now() - at) < 60_000);
    assert.deepEqual([threads, contextLength, cause], [1, 1024, "tab_was_killed"]);
    assert.deepEqual(from, { threads: 2, contextLength: 4096 });
    const kills = (url) => import("/pkg/page.js").then(({ tabKills }) => tabKills(url));
    assert.equal((await third.run(kills, faulty.url)).inARow, 3);
    assert.equal(await answer(third), 1);
    assert.equal((await third.run(kills, faulty.url)).inARow, 0);
    await third.close();

    const kept = await seen(await loaded(browser));
    assert.deepEqual([kept.codes, kept.workers, kept.contextLength], [["stepped_down"], 1, 1024]);
    const wanted = await loaded(browser, { threads: 2, contextLength: 4096 });
    const whole = await seen(wanted);
    assert.deepEqual([whole.codes, whole.workers, whole.contextLength], [[], 2, 4096]);
    assert.equal(await answer(wanted), 1);
    assert.deepEqual(await marks(wanted), [], "the whole configuration has answered");
    const again = await seen(await loaded(browser));
    assert.deepEqual([again.codes, again.workers, again.contextLength], [[], 2, 4096]);
  }));

test("a tab that is killed while it answers is told as that, and what the caller asks for is kept, chromium", () =>
  withBrowser("chromium", async (browser) => {
    const page = await loaded(browser);
    assert.equal(await phaseOf(page), undefined, "an engine that waits is not marked");
    await page.run(() => { void window.seen.engine.completions.create({ prompt: [1, 2, 3], max_tokens: 4000, temperature: 1, seed: 1 }).catch(() => {}); });
    await until("the answer is marked", async () => (await phaseOf(page)) === "generation");
    await crash(page);
    const next = await loaded(browser, { threads: 2, contextLength: 2000 });
    const found = await seen(next);
    assert.deepEqual([found.codes, found.workers, found.contextLength], [["tab_was_killed"], 2, 2000]);
    assert.equal(found.details[0].phase, "generation");
  }));

test("a load that ends in order, and one that goes on in another tab, is no death, chromium", () =>
  withBrowser("chromium", async (browser) => {
    const quiet = async (what, page = undefined) => {
      const found = page ?? (await loaded(browser));
      const { codes, end } = await seen(found);
      assert.deepEqual([codes, end], [[], "ok"], what);
      await answer(found);
      assert.deepEqual(await marks(found), [], what);
      await found.close();
    };
    const ends = {
      reload: (page) => page.reload(),
      "another page": (page) => page.goto("about:blank"),
      close: (page) => page.close(),
      abort: (page) => page.run(() => window.halt.abort()),
    };
    for (const [what, end] of Object.entries(ends)) {
      // The page module may lie elsewhere too.
      const page = await loading(browser, what === "abort" ? { assetsUrl: `${site.url}/pkg/` } : {});
      await end(page);
      await quiet(what);
    }
    const failing = await loading(browser);
    faulty.plan = { status: 500 };
    await failing.run(async () => { const bad = await window.qandle.load(new Blob(["no model"])).catch((error) => error.code); if (bad !== "not_a_model") throw new Error(bad); });
    await failing.close();
    await quiet("a failed load");

    const living = await loading(browser);
    const other = await packagePage(browser, site);
    await other.run(begin, { url: `${site.url}/fixtures/golden/tiny-q4km_h256_untied.gguf` });
    await other.run(begin, { url: faulty.url });
    await new Promise((resolve) => setTimeout(resolve, 300));
    faulty.plan = {};
    await until("both loads end", async () => (await seen(other)).end !== null && (await seen(living)).end !== null);
    assert.deepEqual([(await seen(living)).codes, (await seen(other)).codes], [[], []]);
  }));

test("a load in a worker, and one whose page module or storage is missing, has no marks and does not fail, chromium", () =>
  withBrowser("chromium", async (browser) => {
    const bare = await packageSite({
      onRequest: (request, response, headers) => {
        if (!request.url.includes("qandle_page")) return false;
        response.writeHead(404, headers);
        response.end();
        return true;
      },
    });
    try {
      faulty.reset();
      const page = await packagePage(browser, bare);
      await page.run(begin, { url: faulty.url });
      await until("the load ends", async () => (await seen(page)).end !== null);
      assert.equal((await seen(page)).end, "ok");
      await answer(page);

      const denied = await browser.open("about:blank");
      await denied.evaluateOnNewDocument(() => {
        Object.defineProperty(window, "localStorage", { get() { throw new DOMException("denied", "SecurityError"); } });
      });
      await denied.goto(`${site.url}/`);
      const end = await denied.evaluate(async (url) => {
        const { load } = await import("/pkg/index.js");
        const engine = await load(url, { cache: "none" });
        await engine.close();
        return engine.info.model.architecture;
      }, faulty.url);
      assert.equal(end, "qwen2");

      const inside = await packagePage(browser, site);
      const name = await inside.run(async (url) => {
        const script = `
          import { load } from "${location.origin}/pkg/index.js";
          const engine = await load("${url}", { cache: "none" });
          postMessage(engine.info.model.architecture);`;
        const worker = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })), { type: "module" });
        return new Promise((resolve, reject) => {
          worker.onmessage = ({ data }) => resolve(data);
          worker.onerror = ({ message }) => reject(new Error(message));
        });
      }, faulty.url);
      assert.equal(name, "qwen2");
      assert.deepEqual(await marks(inside), []);
    } finally {
      await bare.close();
    }
  }));

test("after three deaths in a row the chat page asks before it loads, chromium", () =>
  withBrowser("chromium", async (browser) => {
    const chat = await pageSite();
    try {
      const model = encodeURIComponent(faulty.url);
      const state = (page) => page.evaluate(() => document.documentElement.dataset.state);
      const open = async (inARow) => {
        faulty.reset();
        const first = await browser.open(`${chat.url}/`);
        await first.evaluate(([source, inARow]) => {
          localStorage.clear();
          const kill = { phase: "load", at: Date.now(), threads: 2, contextLength: 4096 };
          const value = { kind: "history", source, steps: inARow, inARow, ...kill };
          localStorage.setItem("qandle.mark.test", JSON.stringify({ at: Date.now(), value }));
        }, [faulty.url, inARow]);
        await first.close();
        const page = await browser.open(`${chat.url}/?autoload=1&model=${model}`);
        await until("the page has decided", async () => (await state(page)) !== "idle" || (await page.$eval("#notices", (list) => list.children.length > 0)));
        return page;
      };
      const sure = await open(2);
      await until("the model is ready", async () => (await state(sure)) === "ready");
      await sure.close();
      const asking = await open(3);
      await new Promise((resolve) => setTimeout(resolve, 500));
      assert.deepEqual([await state(asking), faulty.answers], ["idle", 0]);
      assert.match(await asking.$eval("#notices", (list) => list.textContent), /3 times/);
      await asking.click("#load");
      await until("the model is ready", async () => (await state(asking)) === "ready");
      assert.match(await asking.$eval("#notices", (list) => list.textContent), /one thread and a context of 1024/);
      assert.deepEqual(asking.faults, []);
    } finally {
      await chat.close();
    }
  }));

/** Processes of web content that this Firefox has started. */
function contentProcesses(pid) {
  const rows = execFileSync("ps", ["-eo", "pid=,ppid=,args="], { encoding: "utf8" }).trim().split("\n").map((row) => {
    const [, own, parent, args] = /^\s*(\d+)\s+(\d+)\s+(.*)$/.exec(row) ?? [];
    return { own: Number(own), parent: Number(parent), args };
  });
  const family = new Set([pid]);
  for (let size = 0; size !== family.size; ) {
    size = family.size;
    for (const { own, parent } of rows) if (family.has(parent)) family.add(own);
  }
  return rows.filter(({ own, args }) => own !== pid && family.has(own) && /-contentproc .* tab$/.test(args)).map(({ own }) => own);
}

test("a tab whose process is killed while loading takes the next load a step down, firefox", { timeout: 90_000, skip: full ? false : "with --full: its driver does not always outlive the killed processes" }, () =>
  withBrowser("firefox", async (browser) => {
    const page = await loading(browser);
    assert.deepEqual(await seen(page).then(({ codes, workers }) => [codes, workers]), [[], 2]);
    const killed = contentProcesses(browser.pid);
    for (const pid of killed) process.kill(pid, "SIGKILL");
    await until("they are gone", () => !contentProcesses(browser.pid).some((pid) => killed.includes(pid)));
    const next = await seen(await loaded(browser));
    assert.deepEqual([next.codes, next.workers], [told, 1]);
    const reloaded = await loading(browser);
    await reloaded.reload();
    const after = await seen(await loaded(browser));
    assert.deepEqual(after.codes, ["stepped_down"]);
  }));
