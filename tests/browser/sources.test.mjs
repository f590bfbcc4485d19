// Where a model may come from beside one URL: shards, safetensors, files of the device, and imports of them.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { damageChunk } from "./stored.mjs";
import { browsers, openBrowser, packagePage, packageSite } from "./harness.mjs";

let site, asked;
before(async () => {
  asked = [];
  site = await packageSite({ onRequest: ({ url }) => { asked.push(url); return false; } });
});
after(() => site?.close());

/** Loads, gives the logits as text, and says where the weights came from. */
const logits = async ({ source, files, options = {}, prompt = [1, 5, 9, 20, 33] }) => {
  const absolute = (path) => new URL(path, location.href).href;
  const file = async (path) => new File([await (await fetch(path)).blob()], path.split("/").at(-1));
  const resolve = (value) => {
    if (typeof value === "string") return absolute(value);
    if (Array.isArray(value)) return value.map(resolve);
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, key === "quantize" ? each : resolve(each)]));
  };
  const given = files === undefined ? resolve(source) : await Promise.all(files.map(file));
  try {
    const fractions = [];
    const engine = await window.qandle.load(given, { threads: 1, ...options, onProgress: ({ fraction }) => fractions.push(fraction) });
    const values = window.pack(await engine.logits(Uint32Array.from(prompt), { all: true }));
    const { model, load } = engine.info;
    const weights = engine.info.memory.weightsBytes;
    await engine.close();
    const rising = fractions.every((fraction, i) => i === 0 || fraction >= fractions[i - 1]);
    return { values, model, source: load.source, weights, rising };
  } catch (error) {
    return { code: error.code ?? error.name, message: error.message };
  }
};

const f32 = "/fixtures/golden/tiny-f32_tied.gguf";
const shard = (i) => `/fixtures/shards/tiny-f32_tied-0000${i}-of-00003.gguf`;
const repository = { config: "/fixtures/safetensors/config.json", tokenizer: "/fixtures/safetensors/tokenizer.json", weights: "/fixtures/safetensors/model.safetensors" };
const models = ([method, source, ...rest]) => {
  const absolute = (value) => (typeof value === "string" ? new URL(value, location.href).href : Array.isArray(value) ? value.map(absolute) : Object.fromEntries(Object.entries(value).map(([k, v]) => [k, absolute(v)])));
  return window.qandle.models[method](absolute(source), ...rest);
};

for (const name of browsers) {
  test(`shards are one model, from a server in any order, kept, and from files, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      const whole = await page.run(logits, { source: f32 });
      assert.equal(whole.code, undefined, whole.message);
      const urls = { url: [shard(2), shard(3), shard(1)] };
      const apart = await page.run(logits, { source: urls });
      assert.equal(apart.values, whole.values, apart.message);
      assert.equal(apart.source, "network");
      assert.ok(apart.rising);
      assert.equal(await page.run(models, ["has", urls]), true);
      asked.length = 0;
      const again = await page.run(logits, { source: urls });
      assert.deepEqual([again.values === whole.values, again.source], [true, "cache"], again.message);
      assert.deepEqual(asked.filter((url) => url.includes("/fixtures/")), []);
      const estimate = await page.run(models, ["estimate", urls]);
      assert.equal(estimate.parameters, whole.model.parameters);
      await page.run(models, ["delete", urls]);
      assert.equal(await page.run(models, ["has", urls]), false);

      const files = await page.run(logits, { files: [shard(3), shard(1), shard(2)] });
      assert.deepEqual([files.values === whole.values, files.source], [true, "file"], files.message);

      // What is missing is told before any weights are fetched.
      const missing = await page.run(logits, { source: { url: [shard(1), shard(3)] } });
      assert.equal(missing.code, "bad_model");
      assert.match(missing.message, /2/);
      const alone = await page.run(logits, { source: shard(2) });
      assert.equal(alone.code, "bad_model");
      assert.match(alone.message, /shard 2 of 3/);
      await page.close();
    } finally {
      await browser.close();
    }
  });

  test(`safetensors are the same model, as they are and quantised, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      const whole = await page.run(logits, { source: f32 });
      const plain = await page.run(logits, { source: repository });
      assert.equal(plain.values, whole.values, plain.message);
      assert.ok(plain.model.hasTokenizer);
      assert.equal(await page.run(models, ["has", repository]), true);
      asked.length = 0;
      const again = await page.run(logits, { source: repository });
      assert.deepEqual([again.values === whole.values, again.source], [true, "cache"], again.message);
      // Only what the server does not have is asked for again.
      assert.deepEqual(asked.filter((url) => url.includes("/fixtures/") && !url.includes("chat_template")), []);
      for (const quantize of ["q8_0", "q4_0"]) {
        const gguf = await page.run(logits, { source: `/fixtures/safetensors/tiny-f32_tied-${quantize}.gguf` });
        const quantised = await page.run(logits, { source: { ...repository, quantize } });
        assert.equal(quantised.values, gguf.values, quantised.message);
        assert.ok(quantised.weights < plain.weights);
      }
      const other = await page.run(logits, { source: { ...repository, weights: f32 } });
      assert.ok(["bad_model", "not_a_model"].includes(other.code), JSON.stringify(other));
      assert.ok(other.message.includes(f32), other.message);
      await page.close();
    } finally {
      await browser.close();
    }
  });

  test(`a file of the device is used at once, and once imported found without it, ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await packagePage(browser, site);
      const whole = await page.run(logits, { source: f32 });
      const file = await page.run(logits, { files: [f32] });
      assert.deepEqual([file.values === whole.values, file.source], [true, "file"], file.message);
      const found = await page.run(async (path) => {
        const { load, models } = window.qandle;
        const bad = await models.import(new Blob(["<html>"]), "hf:a/b/c.gguf").then(() => "kept", ({ code }) => code);
        await models.import(await (await fetch(path)).blob(), "hf:a/b/c.gguf");
        const engine = await load("hf:a/b/c.gguf", { threads: 1, mirrors: { hf: ["http://localhost:1/"] } });
        const values = window.pack(await engine.logits(Uint32Array.from([1, 5, 9, 20, 33]), { all: true }));
        await engine.close();
        const list = (await models.list()).map(({ source, complete }) => [source, complete]);
        const gone = await models.makeRoom(0);
        return { bad, values, list, gone };
      }, f32);
      assert.equal(found.values, whole.values);
      assert.equal(found.bad, "not_a_model");
      assert.deepEqual(found.list.find(([source]) => source.startsWith("hf:")), ["hf:a/b/c.gguf@main", true]);
      assert.deepEqual(found.gone, []);
      await page.close();
    } finally {
      await browser.close();
    }
  });
}

test("a page that is sent for a small file is not kept, and damage in a kept one is mended", async () => {
  let lie = "";
  const portal = await packageSite({
    onRequest: ({ url }, response, headers) => {
      if (lie === "" || !url.endsWith(lie)) return false;
      response.writeHead(200, { ...headers, "Content-Type": "text/html" });
      response.end("<!doctype html><title>Sign in</title>");
      return true;
    },
  });
  const browser = await openBrowser("chromium");
  try {
    const page = await packagePage(browser, portal);
    for (const name of ["config.json", "tokenizer.json"]) {
      lie = `/${name}`;
      assert.equal((await page.run(logits, { source: repository })).code, "not_a_model", name);
      lie = "";
      const good = await page.run(logits, { source: repository });
      assert.equal(good.code, undefined, good.message);
      await page.run(models, ["delete", repository]);
    }
    lie = "/tokenizer_config.json";
    assert.equal((await page.run(logits, { source: repository })).code, undefined, "what may be missing is taken as missing");
    lie = "";
    await page.run(models, ["delete", repository]);

    const urls = { url: [shard(1), shard(2), shard(3)] };
    const whole = await page.run(logits, { source: urls });
    assert.equal(await page.run(damageChunk, { cut: true }), 3);
    const mended = await page.run(logits, { source: urls });
    assert.equal(mended.values, whole.values, mended.message);
    await page.close();
  } finally {
    await browser.close();
    await portal.close();
  }
});
