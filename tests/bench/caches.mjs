// `./build.sh bench --caches`: what the caches, batched decoding and speculation save, each beside the same work without, in
// one browser and run: a second turn, a repeated request, a turn after a reload, four requests at once, a long prompt
// beside a stream, and guessed tokens.
//   node caches.mjs [--model FILE] [--rounds N] [--threads N] [--browser firefox] [--only NAME[,NAME]] [--json FILE]
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { openBrowser, packagePage, packageSite } from "../browser/harness.mjs";
import { quantile } from "./guard.mjs";
import { count, model, modelSite, value } from "./options.mjs";
import { printColumns, show } from "./table.mjs";

const rounds = count("--rounds", 3);
const threads = count("--threads", 1);
const browserName = value("--browser", "chromium");
const only = value("--only")?.split(",");
const site = await packageSite({ isolated: threads > 1, ...modelSite() });
const rows = [];
const details = {};

/** Opens a page with an engine `window.engine` and `window.ask(body)`: when each token came, from the call, in ms. */
async function openPage(browser, options) {
  const page = await packagePage(browser, site);
  await page.run(async (options) => {
    const { load } = await import("/pkg/index.js");
    window.engine = await load("/models/model.gguf", { tier: "relaxed", contextLength: 4096, ...options });
    window.ask = async (body, on = window.engine) => {
      const began = performance.now();
      const at = [];
      const stream = await on.chat.completions.create({ temperature: 0, stream: true, stream_options: { include_usage: true }, return_tokens: true, ...body });
      let text = "";
      let usage;
      let cached;
      const ids = [];
      for await (const chunk of stream) {
        const { token_ids: more = [], delta } = chunk.choices[0] ?? {};
        for (const id of more) {
          ids.push(id);
          at.push(performance.now() - began);
        }
        text += delta?.content ?? "";
        usage = chunk.usage ?? usage;
        cached = chunk.qandle?.cached ?? cached;
      }
      return { at, ids, text, usage, cached, began, ttftMs: at[0], totalMs: performance.now() - began };
    };
    /** Sentences of about so many tokens, of their own for each seed. */
    window.prose = (tokens, seed) => {
      const words = "river stone letter window garden engine winter signal copper meadow harbour lantern pencil mountain thunder bridge market violin carpet orange".split(" ");
      let text = `Note ${seed}.`;
      for (let i = 0; i < tokens - 4; i++) text += ` ${words[(i * 7 + seed * 13 + ((i * i) % 11)) % words.length]}`;
      return text;
    };
  }, { threads, ...options });
  return page;
}

const median = (list) => quantile(list, 0.5);
const wanted = (name) => only === undefined || only.includes(name);
const row = (name, without, withThem, unit, ratio, bound) => {
  rows.push([name, show(without), show(withThem), unit, `${ratio.toFixed(3)}×`, bound]);
  details[name] = { without, with: withThem, ratio };
  console.log(`${name}: ${show(without)} → ${show(withThem)} ${unit}, ${ratio.toFixed(3)}× (${bound})`);
};

async function secondTurn(browser) {
  const page = await openPage(browser, { cache: "none" });
  const found = [];
  for (let round = 0; round < rounds; round++) {
    found.push(
      await page.run(async (round) => {
        const messages = [
          { role: "system", content: "You are a careful assistant." },
          { role: "user", content: window.prose(460, round) },
        ];
        const first = await window.ask({ messages, max_tokens: 24, session_id: `turn ${round}` });
        // What is computed ahead is part of the first turn's idle time.
        await new Promise((resolve) => setTimeout(resolve, 500));
        const next = [...messages, { role: "assistant", content: first.text }, { role: "user", content: "Which word came first?" }];
        const warm = await window.ask({ messages: next, max_tokens: 4, session_id: `turn ${round}` });
        const cold = await window.ask({ messages: next, max_tokens: 4, cache: "off" });
        if (warm.ids.join() !== cold.ids.join()) throw new Error("the answers are not the same");
        return { warm: warm.ttftMs, cold: cold.ttftMs, tokens: warm.usage };
      }, round),
    );
  }
  const [warm, cold] = [median(found.map((x) => x.warm)), median(found.map((x) => x.cold))];
  row(`second turn, first token (history ${found[0].tokens.prompt_tokens} tokens)`, cold, warm, "ms", warm / cold, "≤ 0.08");
  await page.close();
}

async function repeated(browser) {
  const page = await openPage(browser, { cache: "none" });
  const found = [];
  for (let round = 0; round < rounds; round++) {
    found.push(
      await page.run(async (round) => {
        const body = { messages: [{ role: "user", content: `Write three sentences about the number ${round + 12}.` }], max_tokens: 96 };
        const first = await window.ask(body);
        const again = await window.ask(body);
        if (!again.cached || first.ids.join() !== again.ids.join()) throw new Error("the answer was not kept");
        return { first: first.totalMs, again: again.totalMs };
      }, round),
    );
  }
  const [first, again] = [median(found.map((x) => x.first)), median(found.map((x) => x.again))];
  row("repeated request, last delta", first, again, "ms", again / first, "≤ 0.005, 10 ms");
  await page.close();
}

async function reloaded(browser) {
  const found = [];
  for (let round = 0; round < rounds; round++) {
    const name = `reload ${round}`;
    const before = await openPage(browser, {});
    const next = await before.run(
      async ({ name, round }) => {
        const messages = [{ role: "user", content: window.prose(460, 100 + round) }];
        const first = await window.ask({ messages, max_tokens: 24, session_id: name });
        await new Promise((resolve) => setTimeout(resolve, 500));
        await window.engine.sessions.save(name);
        return [...messages, { role: "assistant", content: first.text }, { role: "user", content: "Which word came first?" }];
      },
      { name, round },
    );
    // Without a word to the engine, as a closed tab goes.
    await before.close();
    const after = await openPage(browser, {});
    found.push(
      await after.run(
        async ({ name, next }) => {
          const warm = await window.ask({ messages: next, max_tokens: 4, session_id: name });
          const cold = await window.ask({ messages: next, max_tokens: 4, cache: "off" });
          if (warm.ids.join() !== cold.ids.join()) throw new Error("the answers are not the same");
          return { warm: warm.ttftMs, cold: cold.ttftMs, cached: warm.usage.prompt_tokens_details.cached_tokens };
        },
        { name, next },
      ),
    );
    if (found.at(-1).cached < 400) throw new Error(`only ${found.at(-1).cached} tokens came back`);
    await after.close();
  }
  const [warm, cold] = [median(found.map((x) => x.warm)), median(found.map((x) => x.cold))];
  row("turn after the page was closed, first token", cold, warm, "ms", warm / cold, "≤ 0.10");
}

async function fourAtOnce(browser) {
  const page = await openPage(browser, { cache: "none", speculation: false });
  const found = [];
  for (let round = 0; round < rounds; round++) {
    found.push(
      await page.run(async (round) => {
        // Never chosen, so that no answer ends before its tokens are counted.
        const body = (i) => ({ messages: [{ role: "user", content: `Tell a story about the number ${round * 10 + i}.` }], max_tokens: 64, cache: "off", logit_bias: { 151643: -100, 151645: -100 } });
        const alone = await window.ask(body(0));
        const rate = (63 * 1000) / (alone.at.at(-1) - alone.at[0]);
        const four = await Promise.all([0, 1, 2, 3].map((i) => window.ask(body(i))));
        if (four[0].ids.join() !== alone.ids.join()) throw new Error("the answers are not the same");
        const at = four.map((one) => one.at.map((ms) => ms + one.began));
        const [from, to] = [Math.max(...at.map((all) => all[0])), Math.min(...at.map((all) => all.at(-1)))];
        const tokens = at.flat().filter((ms) => ms > from && ms <= to).length;
        return { rate, together: (tokens * 1000) / (to - from) };
      }, round),
    );
  }
  const [rate, together] = [median(found.map((x) => x.rate)), median(found.map((x) => x.together))];
  row("four requests at once, decode of all", rate, together, "tok/s", together / rate, "≥ 1.8");
  await page.close();
}

async function promptBeside(browser) {
  const page = await openPage(browser, { cache: "none", speculation: false });
  const found = [];
  for (let round = 0; round < rounds; round++) {
    found.push(
      await page.run(async (round) => {
        const ends = { 151643: -100, 151645: -100 };
        const stream = window.ask({ messages: [{ role: "user", content: `Tell a long story about ${round} ships.` }], max_tokens: 400, cache: "off", logit_bias: ends });
        await new Promise((resolve) => setTimeout(resolve, 3000));
        const began = performance.now();
        const long = await window.ask({ messages: [{ role: "user", content: window.prose(1960, 200 + round) }], max_tokens: 2, cache: "off" });
        const [from, to] = [began, began + long.ttftMs];
        const { at, began: origin } = await stream;
        const gaps = at.slice(1).map((ms, i) => ({ end: ms + origin, ms: ms - at[i] }));
        const beside = gaps.filter(({ end }) => end > from && end <= to).map(({ ms }) => ms);
        const usual = gaps.filter(({ end }) => end <= from).map(({ ms }) => ms);
        return { usual, beside, tokens: long.usage.prompt_tokens, seconds: long.ttftMs / 1000 };
      }, round),
    );
  }
  const usual = median(found.flatMap((x) => x.usual));
  const worst = Math.max(...found.flatMap((x) => x.beside));
  row(`longest gap of a stream beside a prompt of ${found[0].tokens} tokens`, usual, worst, "ms", worst / usual, "≤ 4");
  console.log(`  beside it the stream had ${found.map((x) => x.beside.length).join(", ")} tokens in ${found.map((x) => x.seconds.toFixed(1)).join(", ")} s; median gap ${show(median(found.flatMap((x) => x.beside)))} ms`);
  await page.close();
}

const CODE = `def average_of_items(items):
    total = 0
    count = 0
    for item in items:
        if item is None:
            continue
        total = total + item
        count = count + 1
    if count == 0:
        raise ValueError("no items to average")
    return total / count

def report(items):
    average = average_of_items(items)
    for item in items:
        if item is not None and item > average:
            print("above the average:", item, item - average)
        elif item is not None and item < average:
            print("below the average:", item, average - item)
    return average
`;
const PROMPTS = [
  ["repeats its prompt", `Repeat this code with the variable "total" renamed to "amount". Answer with the code only.\n\n${CODE}`, 260, "≥ 1.5"],
  ["a story", "Tell a story about a lighthouse keeper and a storm.", 160, "≥ 0.97"],
  ["a sum", "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Explain each step.", 160, "≥ 0.97"],
  ["code", "Write a Python class for a bounded stack with push, pop and peek, with docstrings.", 160, "≥ 0.97"],
  ["Chinese", "请用中文介绍一下长城的历史。", 160, "≥ 0.97"],
];

async function guesses(browser) {
  const page = await openPage(browser, { cache: "none" });
  await page.run(async (threads) => {
    window.plain = await (await import("/pkg/index.js")).load("/models/model.gguf", { tier: "relaxed", threads, contextLength: 4096, cache: "none", speculation: false });
  }, threads);
  for (const [name, content, most, bound] of PROMPTS) {
    const found = [];
    for (let round = 0; round < rounds; round++) {
      found.push(
        await page.run(
          async ({ content, most, round }) => {
            const body = { messages: [{ role: "user", content }], max_tokens: most, cache: "off" };
            const sides = [["with", window.engine], ["without", window.plain]];
            const replies = {};
            for (const [side, engine] of round % 2 === 0 ? sides : sides.toReversed()) replies[side] = await window.ask(body, engine);
            if (replies.with.ids.join() !== replies.without.ids.join()) throw new Error("the answers are not the same");
            const rate = ({ at }) => ((at.length - 1) * 1000) / (at.at(-1) - at[0]);
            return { with: rate(replies.with), without: rate(replies.without), details: replies.with.usage.completion_tokens_details, text: replies.with.text };
          },
          { content, most, round },
        ),
      );
    }
    const [without, withGuesses] = [median(found.map((x) => x.without)), median(found.map((x) => x.with))];
    row(`guessed tokens, ${name}`, without, withGuesses, "tok/s", median(found.map((x) => x.with / x.without)), bound);
    const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = found[0].details;
    console.log(`  ${right} guesses came true, ${wrong} did not; ${found.map((x) => (x.with / x.without).toFixed(2)).join(", ")}`);
    details[`text, ${name}`] = found[0].text;
  }
  await page.close();
}

const parts = { turn: secondTurn, repeat: repeated, reload: reloaded, four: fourAtOnce, beside: promptBeside, guesses };
const browser = await openBrowser(browserName);
try {
  for (const [name, part] of Object.entries(parts)) if (wanted(name)) await part(browser);
} finally {
  await browser.close();
  await site.close();
}
console.log(`\n${path.basename(model)}, ${browserName}, relaxed, ${threads} thread${threads === 1 ? "" : "s"}, ${rounds} round${rounds === 1 ? "" : "s"}\n`);
printColumns([["", "without", "with", "", "×", "asked"], ...rows], 1);
const json = value("--json");
if (json !== undefined) await writeFile(json, `${JSON.stringify({ model: path.basename(model), browser: browserName, threads, rounds, details }, null, 1)}\n`);
