// R1's text side through the whole engine: its real vocabulary and template on a tiny random model, whose words mean nothing.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
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

test("R1's chats have one BOS, typed special tokens stay text, and thoughts leave the answer", async () => {
  const { cases } = JSON.parse(await readFile(new URL("../fixtures/text/chat_cases.json", import.meta.url), "utf8"));
  const rendered = cases
    .filter(({ context, expected }) => context.add_generation_prompt === true && context.tools === undefined && Array.isArray(expected.r1?.ids) && context.messages.every((m) => ["system", "user", "assistant"].includes(m.role) && typeof m.content === "string" && Object.keys(m).length === 2))
    .map(({ context, expected }) => ({ messages: context.messages, text: expected.r1.text, ids: expected.r1.ids_content_plain ?? expected.r1.ids }));
  assert.ok(rendered.length >= 5, `${rendered.length} chats`);
  const page = await packagePage(browser, site);
  const found = await page.run(async (rendered) => {
    const packed = await fetch("/fixtures/golden/r1-tiny.gguf.gz");
    const blob = await new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).blob();
    const engine = await window.qandle.load(blob, { threads: 1 });
    const results = [];
    for (const { messages } of rendered) {
      const text = await engine.applyChatTemplate(messages);
      const count = await engine.countTokens(messages);
      const reply = await engine.chat.completions.create({ messages, max_tokens: 6, temperature: 0, return_tokens: true });
      results.push({ text, count, prompt: reply.usage.prompt_tokens });
    }
    // The template drops old thoughts; an answer that thinks is split while it streams.
    const think = (await engine.tokenize("<think>", { special: true }))[0];
    const word = (await engine.tokenize("hello"))[0];
    const forced = async (bias) => {
      const parts = { reasoning: "", content: "" };
      const stream = await engine.chat.completions.create({ messages: [{ role: "user", content: "hi" }], max_tokens: 5, temperature: 0, logit_bias: bias, stream: true });
      for await (const chunk of stream) {
        parts.reasoning += chunk.choices[0]?.delta.reasoning_content ?? "";
        parts.content += chunk.choices[0]?.delta.content ?? "";
      }
      return parts;
    };
    const split = await forced({ [think]: 100 });
    const plain = await forced({ [word]: 100 });
    await engine.close();
    return { results, split, plain };
  }, rendered);
  for (const [i, { text, ids }] of rendered.entries()) {
    assert.equal(found.results[i].text, text);
    assert.equal(found.results[i].prompt, ids.length, text);
    assert.equal(found.results[i].count, ids.length, text);
  }
  assert.equal(found.split.content, "", "all that follows an open <think> is thought");
  assert.equal(found.plain.reasoning, "");
  assert.equal(found.plain.content, "hello".repeat(5));
  await page.close();
});
