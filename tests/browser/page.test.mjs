// The built chat page with the default model: a question that is typed is answered, in both browsers.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { browsers, openBrowser, pageSite } from "./harness.mjs";

const LOAD_MS = 300_000;
const ANSWER_MS = 300_000;

let site;
before(async () => {
  site = await pageSite();
});
after(() => site?.close());

const state = (page, wanted, timeout) =>
  page.waitForFunction((states) => states.includes(document.documentElement.dataset.state), { timeout, polling: 200 }, wanted);

for (const name of browsers) {
  test(`a question typed on the page is answered in ${name}`, async () => {
    const browser = await openBrowser(name);
    try {
      const page = await browser.open(`${site.url}/?autoload=1`);
      assert.equal(await page.evaluate(() => crossOriginIsolated), true, "the page is cross-origin isolated");
      await state(page, ["ready", "error"], LOAD_MS);
      const status = () => page.$eval("#status", (node) => node.textContent);
      assert.equal(await page.evaluate(() => document.documentElement.dataset.state), "ready", await status());
      await page.type("#prompt", "What is the capital of France? Answer in one sentence.");
      await page.click("#send");
      await page.waitForFunction(() => (document.querySelector(".message.assistant")?.textContent ?? "").length > 0, { timeout: ANSWER_MS, polling: 200 });
      await state(page, ["ready", "error"], ANSWER_MS);
      assert.equal(await page.evaluate(() => document.documentElement.dataset.state), "ready", await status());
      const answer = await page.$$eval(".message.assistant", (nodes) => nodes.at(-1).textContent);
      assert.match(answer, /Paris/);
      assert.deepEqual(page.faults, []);
    } finally {
      await browser.close();
    }
  });
}
