// Chats and texts that are longer than the context, through the package: turns leave and are told, or a window forgets.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { openBrowser, packagePage, packageSite } from "./harness.mjs";

let site, browser;
before(async () => {
  site = await packageSite();
  browser = await openBrowser("chromium");
});
after(async () => {
  await browser?.close();
  await site?.close();
});

test("a chat that is longer than the context loses its oldest turns, says how many messages, and is refused where that is asked", async () => {
  const page = await packagePage(browser, site);
  const found = await page.run(async () => {
    const packed = await fetch("/fixtures/golden/r1-tiny.gguf.gz");
    const blob = await new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).blob();
    const engine = await window.qandle.load(blob, { threads: 1, contextLength: 256 });
    const messages = [{ role: "system", content: "You are a calculator." }];
    for (let i = 0; i < 20; i++) {
      messages.push({ role: "user", content: `What is ${i} + 4?` }, { role: "assistant", content: `It is ${i + 4}, as everybody can see.` });
    }
    messages.push({ role: "user", content: "And now?" });
    const ask = (messages, more = {}) => engine.chat.completions.create({ messages, max_tokens: 6, temperature: 0, return_tokens: true, ...more });
    const reply = await ask(messages);
    const dropped = reply.qandle.dropped_messages;
    const alone = await ask([messages[0], ...messages.slice(1 + dropped)], { truncation: "disabled", cache: "off" });
    const refused = await ask(messages, { truncation: "disabled" }).catch(({ code }) => code);
    const senseless = await ask(messages, { truncation: "middle" }).catch(({ code }) => code);
    let streamed;
    for await (const chunk of await ask(messages, { stream: true })) streamed = chunk.qandle?.dropped_messages;
    await engine.close();
    const ids = (reply) => Array.from(reply.choices[0].token_ids);
    return { dropped, streamed, same: [ids(reply), ids(alone)], none: alone.qandle.dropped_messages, refused, senseless, tokens: reply.usage.prompt_tokens };
  });
  await page.close();
  assert.ok(found.dropped > 20 && found.dropped % 2 === 0 && found.tokens <= 128, JSON.stringify(found));
  assert.deepEqual([found.streamed, found.none], [found.dropped, 0]);
  assert.deepEqual(found.same[0], found.same[1]);
  assert.deepEqual([found.refused, found.senseless], ["context_overflow", "invalid_request"]);
});

/** Answers prompts of one session in an engine with a window. */
const visit = async ({ prompts, window: size, cache }) => {
  const url = new URL("/fixtures/golden/tiny-q4km_h256_untied.gguf", location.href).href;
  const engine = await window.qandle.load(url, { threads: 1, contextLength: 128, window: size, cache });
  const answers = [];
  for (const prompt of prompts) {
    const reply = await engine.completions.create({ prompt, session_id: "s", max_tokens: 6, temperature: 0, return_tokens: true, cache: "refresh" });
    answers.push({ ids: Array.from(reply.choices[0].token_ids), cached: reply.usage.prompt_tokens_details.cached_tokens });
  }
  const list = () => engine.sessions.list();
  for (let i = 0; cache !== "none" && i < 100 && (await list()).some(({ where }) => where === "memory"); i++) await new Promise((resolve) => setTimeout(resolve, 50));
  const [{ bytes, tokens }] = await list();
  await engine.close();
  return { answers, bytes, tokens };
};

test("with a window a text passes the context, its cache stays small, and it is there after a reload", async () => {
  const first = Array.from({ length: 400 }, (_, i) => (i * 37 + 11) % 200);
  let page = await packagePage(browser, site);
  const cold = async (prompt, size) => (await page.run(visit, { prompts: [prompt], window: size, cache: "none" })).answers[0].ids;
  const one = await page.run(visit, { prompts: [first], window: 64 });
  assert.deepEqual(one.answers, [{ ids: await cold(first, 64), cached: 0 }]);
  const next = [...first, ...one.answers[0].ids, 5, 6, 7];
  await page.close();
  page = await packagePage(browser, site);
  const two = await page.run(visit, { prompts: [next], window: 64 });
  assert.deepEqual(two.answers, [{ ids: await cold(next, 64), cached: one.tokens }]);
  assert.ok(two.tokens > 400, `${two.tokens} tokens`);
  // Pages of another window are not these.
  const wider = await page.run(visit, { prompts: [next], window: 128 });
  assert.deepEqual(wider.answers, [{ ids: await cold(next, 128), cached: 0 }]);
  assert.equal(wider.bytes / two.bytes, 4 / 3, "the first page, the window's and the one that is being filled");
  await page.close();
});
