// `./build.sh bench --workload`: the requests of workload.json in Chromium, one after another, with all caches off (each is
// prefilled from nothing) and with caches on (a session for each conversation, kept answers), each in a fresh browser.
// Says what the caches save, and whether the answers are the same token for token.
//   node workload.mjs [--model FILE] [--requests N] [--rounds N] [--threads N] [--browser firefox] [--json FILE]
// The requests are tests/fixtures/text/workload.json, given with the project's design; its rules stand in "note".
import { readFile, writeFile } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { openBrowser, packageSite } from "../browser/harness.mjs";
import { load1, processTree, quantile, sample } from "./guard.mjs";
import { count, here, model, modelSite, value } from "./options.mjs";
import { printColumns, show } from "./table.mjs";

const workload = JSON.parse(await readFile(here("../fixtures/text/workload.json"), "utf8"));
const requests = workload.requests.slice(0, count("--requests", workload.requests.length));
const rounds = count("--rounds", 1);
const threads = count("--threads", 1);
const browserName = value("--browser", "chromium");
const kinds = ["off", "on"];
const site = await packageSite({ isolated: threads > 1, ...modelSite() });

/** All requests on a page with an engine that has not answered yet, `report` after each. */
async function ask(page, kind, report) {
  const chats = new Map();
  const replies = [];
  for (const [i, { session, user, repeat_of_first_turn: repeated }] of requests.entries()) {
    const messages = chats.get(session) ?? [{ role: "system", content: workload.system }];
    messages.push({ role: "user", content: user ?? workload.requests.find((request) => request.session === repeated).user });
    const { max_tokens, temperature } = workload;
    const caches = kind === "on" ? { cache: "auto", session_id: session ?? `${repeated} again, request ${i}` } : { cache: "off" };
    const reply = await page.evaluate((body) => window.request(body), { messages, max_tokens, temperature, ...caches });
    messages.push({ role: "assistant", content: reply.text });
    if (session !== undefined) chats.set(session, messages);
    replies.push(reply);
    report(i, reply);
  }
  return replies;
}

async function run(kind, round) {
  const browser = await openBrowser(browserName);
  try {
    const page = await browser.open(`${site.url}/`);
    await page.waitForFunction(() => window.loadEngine !== undefined);
    // Nothing is stored, so that no work on the store goes on beside the answers.
    const { runtime } = await page.evaluate((options) => window.loadEngine(options), { name: "qandle", tier: "relaxed", threads, contextLength: 4096, cache: "none" });
    const before = processTree(browser.pid).seconds;
    const { value: replies, foreign } = await sample(
      () =>
        ask(page, kind, (i, { ttftMs, totalMs, promptTokens, cachedTokens, cached }) => {
          const taken = cached ? "the answer was kept" : `${cachedTokens} of ${promptTokens} tokens cached`;
          console.log(`round ${round + 1}, caches ${kind.padEnd(3)}, request ${String(i + 1).padStart(3)}: first token ${ttftMs.toFixed(0).padStart(6)} ms, end ${totalMs.toFixed(0).padStart(6)} ms, ${taken} (load ${load1().toFixed(1)})`);
        }),
      { tries: 1, quietSeconds: 2 },
    );
    const cpuSeconds = processTree(browser.pid).seconds - before;
    const memoryBytes = await page.evaluate(() => window.memoryBytes());
    const { caches } = await page.evaluate(() => window.metrics());
    return { kind, browser: browser.version, runtime, replies, foreignCores: foreign, cpuSeconds, memoryBytes, caches };
  } finally {
    await browser.close();
  }
}

const runs = [];
for (let round = 0; round < rounds; round++) {
  // The one that begins changes, as a machine may grow slower while it works.
  for (const kind of round % 2 === 0 ? kinds : kinds.toReversed()) runs.push(await run(kind, round));
}
await site.close();

/** What is compared of all runs with caches off or on. */
function figures(kind) {
  const own = runs.filter((run) => run.kind === kind);
  const replies = own.flatMap((run) => run.replies);
  const sum = (list) => list.reduce((total, x) => total + x, 0);
  const spread = (key) => {
    const all = replies.map((reply) => reply[key]);
    return { mean: sum(all) / all.length, p50: quantile(all, 0.5), p95: quantile(all, 0.95) };
  };
  return {
    ttftMs: spread("ttftMs"),
    totalMs: spread("totalMs"),
    requestsPerMinute: (60_000 * replies.length) / sum(replies.map(({ totalMs }) => totalMs)),
    cachedShare: sum(replies.map(({ cachedTokens }) => cachedTokens)) / sum(replies.map(({ promptTokens }) => promptTokens)),
    cpuSeconds: sum(own.map((run) => run.cpuSeconds)) / own.length,
    memoryBytes: Math.max(...own.map((run) => run.memoryBytes)),
    foreignCores: Math.max(...own.map((run) => run.foreignCores)),
    caches: own[0].caches,
  };
}

const [off, on] = kinds.map(figures);
const title = `${path.basename(model)}, ${browserName}, relaxed, ${threads} thread${threads === 1 ? "" : "s"}`;
console.log(`\n${title}: ${requests.length} requests of ${workload.max_tokens} tokens at most, ${rounds} round${rounds === 1 ? "" : "s"}; × is on against off\n`);
const line = (name, pick, digits) => [name, show(pick(off), digits), show(pick(on), digits), `${(pick(on) / pick(off)).toFixed(3)}×`];
const spreads = [["time to first token", "ttftMs"], ["end to end", "totalMs"]].flatMap(([name, key]) =>
  [["mean", "mean"], ["P50", "p50"], ["P95", "p95"]].map(([word, part]) => line(`${name}, ${word}, ms`, (of) => of[key][part], 0)),
);
printColumns(
  [
    ["", "caches off", "on", "×"],
    ...spreads,
    line("requests a minute", (of) => of.requestsPerMinute, 2),
    line("CPU, s", (of) => of.cpuSeconds, 1),
    line("peak wasm memory, MB", (of) => of.memoryBytes / 1e6, 1),
    ["prompt tokens not prefilled", ...[off, on].map(({ cachedShare }) => `${(100 * cachedShare).toFixed(1)} %`), ""],
    ["cores that others used", ...[off, on].map(({ foreignCores }) => show(foreignCores, 2)), ""],
  ],
  1,
);
console.log("");
for (const [name, { hits, misses, entries, bytes, ...more }] of Object.entries(on.caches)) {
  const rate = hits + misses === 0 ? "not asked" : `${((100 * hits) / (hits + misses)).toFixed(1)} % hits (${hits} of ${hits + misses})`;
  const rest = Object.entries(more).filter(([, x]) => typeof x === "number").map(([key, x]) => `, ${key} ${Number(x.toFixed(3))}`);
  console.log(`${name} cache: ${rate}, ${entries} entries, ${(bytes / 1e6).toFixed(2)} MB${rest.join("")}`);
}

const want = runs[0].replies;
const different = runs.flatMap(({ kind, replies }) =>
  replies.flatMap(({ ids }, i) => (ids.length > 0 && ids.join() === want[i].ids.join() ? [] : [`request ${i + 1}, caches ${kind}: ${JSON.stringify(ids)} instead of ${JSON.stringify(want[i].ids)}`])),
);
console.log(different.length === 0 ? `all ${requests.length} answers are the same, token for token` : `${different.length} answers are not the same:\n${different.join("\n")}`);
const prefilled = runs.filter(({ kind }) => kind === "off").flatMap(({ replies }) => replies).filter(({ cachedTokens }) => cachedTokens > 0);
if (prefilled.length > 0) console.log(`with caches off, ${prefilled.length} requests took tokens from a cache`);

const json = value("--json");
if (json !== undefined) {
  const machine = { cpu: os.cpus()[0].model.trim(), cores: os.cpus().length, node: process.version };
  const report = { machine, browser: runs[0].browser, model: path.basename(model), threads, rounds, requests: requests.length, off, on, sameAnswers: different.length === 0, runs };
  await writeFile(json, `${JSON.stringify(report, null, 1)}\n`);
}
process.exit(different.length === 0 && prefilled.length === 0 ? 0 : 1);
