// Sessions between visits: what was computed is there after a reload, a killed worker or an eviction, and nothing wrong is.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { browsers, openBrowser, packagePage, packageSite } from "./harness.mjs";

const model = "/fixtures/golden/tiny-q4km_h256_untied.gguf";
const other = "/fixtures/golden/tiny-q8_0_untied.gguf";
const PAGE = 64;

let site;
before(async () => {
  site = await packageSite();
});
after(() => site?.close());

/** Loads, does `asks` one after another, and says what came of each; then of the sessions, and closes unless `leave`. */
const visit = async ({ path, asks = [], options = {}, settle = true, leave = false }) => {
  const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1, ...options });
  const answers = [];
  for (const { prompt, session_id, ...rest } of asks) {
    const reply = await engine.completions.create({ prompt, session_id, max_tokens: 6, temperature: 0, return_tokens: true, ...rest });
    const { usage, choices } = reply;
    answers.push({ ids: Array.from(choices[0].token_ids), cached: usage.prompt_tokens_details.cached_tokens });
  }
  const list = () => engine.sessions.list();
  for (let i = 0; settle && i < 100 && (await list()).some(({ where }) => where === "memory"); i++) await new Promise((resolve) => setTimeout(resolve, 50));
  const sessions = Object.fromEntries((await list()).map(({ id, tokens, where }) => [id, `${tokens} ${where}`]));
  if (!leave) await engine.close();
  return { answers, sessions };
};

/** Does something to every value of a store of the database whose key `matches`; the keys of all. */
const change = async ({ store, matches = "", flip = false, drop = false }) => {
  const opened = await new Promise((resolve) => {
    const request = indexedDB.open("qandle");
    request.onsuccess = () => resolve(request.result);
  });
  const done = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const table = () => opened.transaction(store, "readwrite").objectStore(store);
  const keys = await done(table().getAllKeys());
  for (const key of keys.filter((key) => key.includes(matches))) {
    const value = await done(table().get(key));
    if (drop) await done(table().delete(key));
    else if (flip && typeof value === "string") await done(table().put(value.replace(/"tokens":\[(\d)/, (_, digit) => `"tokens":[${9 - digit}`), key));
    else if (flip) await done(table().put(value.map((byte, i) => (i === 1000 ? byte ^ 1 : byte)), key));
  }
  opened.close();
  return keys;
};

const first = Array.from({ length: 200 }, (_, i) => (i * 37 + 11) % 200);
const next = (answer) => [...first, ...answer, 5, 6, 7];

async function inPage(name, run) {
  const browser = await openBrowser(name);
  try {
    let page = await packagePage(browser, site);
    const renewed = async () => {
      await page.close();
      page = await packagePage(browser, site);
      return page;
    };
    await run({ browser, page: () => page, renewed });
  } finally {
    await browser.close();
  }
}

/** The ids that a prompt is answered with where nothing was computed before. */
const cold = async (page, prompt, path = model) => {
  const { answers } = await page.run(visit, { path, asks: [{ prompt }], options: { cache: "none" }, settle: false });
  assert.equal(answers[0].cached, 0);
  return answers[0].ids;
};

for (const name of browsers) {
  test(`a session is there after a reload and after a worker that ended in mid-air, ${name}`, () =>
    inPage(name, async ({ page, renewed }) => {
      const one = await page().run(visit, { path: model, asks: [{ prompt: first, session_id: "s" }], leave: true });
      const answer = one.answers[0].ids;
      assert.deepEqual([answer, one.sessions], [await cold(page(), first), { s: `${first.length + answer.length - 1} both` }]);

      // The engine was never closed: its worker ends with the page.
      const prompt = next(answer);
      await renewed();
      const two = await page().run(visit, { path: model, asks: [{ prompt, session_id: "s" }] });
      assert.deepEqual(two.answers, [{ ids: await cold(page(), prompt), cached: first.length + answer.length - 1 }]);

      // An edit of the beginning keeps what is still the same.
      await renewed();
      const edited = [...first.slice(0, 100), 3, ...first.slice(101)];
      const three = await page().run(visit, { path: model, asks: [{ prompt: edited, session_id: "s" }, { prompt: first, session_id: "new", cache: "off" }] });
      assert.deepEqual(three.answers[0], { ids: await cold(page(), edited), cached: 100 });
      assert.deepEqual(Object.keys(three.sessions).sort(), ["new", "s"]);
    }));

  test(`what is damaged, of another model or deleted does not come back, and the turn is answered rightly, ${name}`, () =>
    inPage(name, async ({ page, renewed }) => {
      const begin = async () => (await page().run(visit, { path: model, asks: [{ prompt: first, session_id: "s", cache: "refresh" }] })).answers[0].ids;
      const answer = await begin();
      const prompt = next(answer);
      const want = await cold(page(), prompt);
      const again = async (options = {}) => {
        await renewed();
        return (await page().run(visit, { path: model, asks: [{ prompt, session_id: "s", cache: "refresh" }], ...options })).answers[0];
      };
      for (const [damage, cached] of [
        [{ store: "pages", matches: "/2/", flip: true }, 2 * PAGE],
        [{ store: "pages", matches: "/0/", flip: true }, 0],
        [{ store: "pages", matches: "/1/", drop: true }, PAGE],
        [{ store: "sessions", flip: true }, 0],
        [{ store: "sessions", drop: true }, 0],
      ]) {
        await page().run(visit, { path: model, asks: [{ prompt, session_id: "s", cache: "refresh" }] });
        assert.ok((await page().run(change, damage)).length > 0);
        assert.deepEqual(await again(), { ids: want, cached }, JSON.stringify(damage));
        // What was lost is written anew.
        assert.equal((await again()).cached, prompt.length - 1);
        const keys = await page().run(change, { store: "pages" });
        assert.equal(keys.length, Math.ceil((prompt.length + 5) / PAGE), "no page is left over");
      }

      const foreign = await page().run(visit, { path: other, asks: [{ prompt, session_id: "s" }] });
      assert.deepEqual(foreign.answers[0], { ids: await cold(page(), prompt, other), cached: 0 });
      assert.equal((await again()).cached, prompt.length - 1, "each model has its own");
      const q8 = await page().run(visit, { path: model, asks: [{ prompt, session_id: "s" }], options: { kv: "q8" } });
      assert.equal(q8.answers[0].cached, 0);

      const left = await page().run(async (path) => {
        const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1 });
        const ask = (session_id) => engine.completions.create({ prompt: [1, 2, 3], session_id, max_tokens: 2, cache: "off" });
        await ask("kept");
        await engine.sessions.save("kept");
        const kept = (await engine.sessions.get("kept")).where;
        const unknown = await engine.sessions.save("unknown").catch(({ code }) => code);
        const fork = (await engine.sessions.fork("kept", "fork")).tokens;
        await engine.sessions.save("fork");
        await engine.sessions.delete("kept");
        const without = (await engine.sessions.list()).map(({ id }) => id).sort();
        await ask("late");
        await engine.sessions.clear();
        await new Promise((resolve) => setTimeout(resolve, 600));
        const list = await engine.sessions.list();
        await engine.close();
        return { kept, unknown, fork, without, list };
      }, model);
      assert.deepEqual(left, { kept: "both", unknown: "invalid_request", fork: 4, without: ["fork", "s"], list: [] });
      assert.equal((await page().run(change, { store: "sessions" })).length, 1, "the other model's is left");
    }));
}

test("sessions that leave memory come back from the disk, within the bounds of both", () =>
  inPage("chromium", async ({ page, renewed }) => {
    const prompt = (i) => [i, ...first.slice(0, 90), i + 1];
    const ids = Array.from({ length: 12 }, (_, i) => i);
    const ask = (i) => ({ prompt: prompt(i), session_id: `s${i}`, cache: "refresh" });
    const limits = { maxSessions: 2 };
    const all = await page().run(visit, { path: model, asks: ids.map(ask), options: { limits } });
    assert.equal(Object.keys(all.sessions).length, 12);
    assert.equal(Object.values(all.sessions).filter((text) => text.endsWith("both")).length, 2);
    const back = await page().run(visit, { path: model, asks: ids.map(ask), options: { limits } });
    assert.deepEqual(back.answers, all.answers.map(({ ids: answer }) => ({ ids: answer, cached: 91 })));

    // Seven of two pages each: the five that were used longest ago go.
    await renewed();
    const bytes = (await page().run(async (path) => {
      const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1 });
      const [{ bytes }] = await engine.sessions.list();
      await engine.close();
      return bytes;
    }, model));
    const few = await page().run(visit, { path: model, asks: [ask(11)].map((one) => ({ ...one, prompt: [...one.prompt, 9] })), options: { limits: { ...limits, diskBytes: Math.round(7.5 * bytes) } } });
    assert.deepEqual(Object.keys(few.sessions).sort(), ["s10", "s11", "s5", "s6", "s7", "s8", "s9"]);
    // None on disk where none is wanted.
    for (const options of [{ cache: "none" }, { limits: { diskBytes: 0 } }]) {
      const none = await page().run(visit, { path: model, asks: [ask(3)], options, settle: false });
      assert.deepEqual([Object.keys(none.sessions), none.answers[0].cached], [["s3"], 0]);
    }
  }));

test("a full disk is no fault of a turn", () =>
  inPage("chromium", async ({ page }) => {
    await page().run(visit, { path: model, asks: [{ prompt: first, session_id: "old" }] });
    const client = await page().createCDPSession();
    const usage = await page().evaluate(async () => (await navigator.storage.estimate()).usage);
    await client.send("Storage.overrideQuotaForOrigin", { origin: site.url, quotaSize: Math.round(usage + 1000) });
    const { answers } = await page().run(visit, { path: model, asks: [{ prompt: next([1]), session_id: "new" }, { prompt: next([1, 2]), session_id: "new" }], settle: false });
    assert.deepEqual(answers.map(({ ids }) => ids), [await cold(page(), next([1])), await cold(page(), next([1, 2]))]);
  }));

test("with the last model its sessions go", () =>
  inPage("chromium", async ({ page }) => {
    await page().run(visit, { path: model, asks: [{ prompt: first, session_id: "s" }] });
    await page().run((path) => window.qandle.models.delete(new URL(path, location.href).href), model);
    for (const store of ["sessions", "pages"]) assert.deepEqual(await page().run(change, { store }), []);
  }));

test("a session that is deleted while it comes back from the disk stays deleted", () =>
  inPage("chromium", async ({ page, renewed }) => {
    const { answers } = await page().run(visit, { path: model, asks: [{ prompt: first, session_id: "s" }] });
    await renewed();
    const prompt = next(answers[0].ids);
    const found = await page().run(async ({ path, prompt }) => {
      const engine = await window.qandle.load(new URL(path, location.href).href, { threads: 1 });
      const asked = engine.completions.create({ prompt, session_id: "s", max_tokens: 6, temperature: 0, return_tokens: true });
      await engine.sessions.delete("s");
      const ids = Array.from((await asked).choices[0].token_ids);
      await new Promise((resolve) => setTimeout(resolve, 600));
      const list = await engine.sessions.list();
      await engine.close();
      return { ids, list };
    }, { path: model, prompt });
    assert.deepEqual(found, { ids: await cold(page(), prompt), list: [] });
    assert.deepEqual(await page().run(change, { store: "pages" }), []);
  }));
