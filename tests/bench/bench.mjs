// `./build.sh bench`: our four builds beside wllama and native llama.cpp, on the same file, in one run. Engines take turns
// in every round, each in a fresh browser profile; the table shows medians over the rounds.
//   node bench.mjs [--quick] [--model FILE] [--rounds N] [--engines NAME,NAME] [--threads N] [--tiers NAME,NAME] [--browser firefox] [--json FILE]
import { execFile, execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, rm, stat, writeFile } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { promisify } from "node:util";
import { openBrowser, packageSite } from "../browser/harness.mjs";
import { load1, median, residentBytes, sample } from "./guard.mjs";
import { count, here, model, modelSite, value } from "./options.mjs";
import { chatOf, followUp } from "./prompts.mjs";
import { printTable } from "./table.mjs";
import { weightBytes } from "./tensors.mjs";

const root = here("../../");
const quick = process.argv.includes("--quick");
const rounds = count("--rounds", 3);
const lengths = quick ? [128] : [32, 128, 512];
const decodeTokens = quick ? 32 : 64;
const guard = quick ? { tries: 1, quietSeconds: 2 } : { tries: 3, quietSeconds: 45 };

// wllama 3 is too slow for more than 32 tokens.
const all = [
  ...[1, 2].flatMap((threads) => [
    { engine: "qandle", tier: "simd128", threads },
    { engine: "qandle", tier: "relaxed", threads },
    { engine: "wllama-2.3.1", tier: null, threads },
    ...(quick ? [] : [{ engine: "wllama-3", tier: null, threads, lengths: [32], decodeTokens: 16 }]),
    { engine: "llama.cpp-native", tier: null, threads },
  ]),
];
const browserName = value("--browser", "chromium");
const listed = (name) => value(name, "").split(",").filter(Boolean);
const among = (list, item) => list.length === 0 || list.includes(String(item));
const [engines, tierNames, threadCounts] = ["--engines", "--tiers", "--threads"].map(listed);
const plans = all.filter(({ engine, tier, threads }) => among(engines, engine) && among(threadCounts, threads) && (tier === null || among(tierNames, tier)));

const build = path.join(root, ".build/bench");
await mkdir(build, { recursive: true });
execFileSync(path.join(root, "tests/node_modules/.bin/wasm-as"), ["--enable-simd", "--enable-threads", "--enable-bulk-memory", here("bandwidth.wat"), "-o", path.join(build, "bandwidth.wasm")]);

const modules = here("node_modules");
const modelName = path.basename(model);
const options = modelSite({
  "/wasm/": build,
  "/wllama-2/": path.join(modules, "wllama-2/esm"),
  "/wllama-3/": path.join(modules, "@wllama/wllama/esm"),
});
// Without isolation an engine has one thread: that is how the one-thread rows are measured.
const sites = { 1: await packageSite({ ...options, isolated: false }), 2: await packageSite(options) };
const label = ({ engine, tier, threads }) => `${engine}${tier === null ? "" : ` ${tier}`}, ${threads} thread${threads === 1 ? "" : "s"}`;
const began = performance.now();
const log = (text) => console.log(`[${((performance.now() - began) / 1000).toFixed(0).padStart(4)} s, load ${load1().toFixed(1)}] ${text}`);

/** Chats for all rounds, counted by our own tokenizer; native llama.cpp gets the same token ids. */
async function makePrompts() {
  const browser = await openBrowser(browserName);
  try {
    const page = await browser.open(`${sites[1].url}/`);
    await page.waitForFunction(() => window.loadEngine !== undefined);
    await page.evaluate((options) => window.loadEngine(options), { name: "qandle", tier: "simd128", threads: 1 });
    const tokens = (messages) => page.evaluate((m) => window.count(m), messages);
    const prompts = [];
    for (let round = 0; round < rounds; round++) {
      const chats = {};
      for (const [i, length] of lengths.entries()) {
        const messages = await chatOf(length, round * 5 + i, tokens);
        chats[length] = { messages, ids: await page.evaluate((m) => window.tokens(m), messages) };
      }
      chats.warmup = { messages: await chatOf(32, round * 5 + 3, tokens) };
      chats.turns = { messages: await chatOf(128, round * 5 + 4, tokens) };
      prompts.push(chats);
    }
    return { prompts, browserVersion: browser.version };
  } finally {
    await browser.close();
  }
}

async function measureBandwidth() {
  const browser = await openBrowser(browserName);
  try {
    const page = await browser.open(`${sites[2].url}/`);
    await page.waitForFunction(() => window.bandwidth !== undefined);
    const rates = {};
    for (const threads of [1, 2]) {
      const { value: rate, foreign } = await sample(() => page.evaluate((n) => window.bandwidth(n), threads), guard);
      rates[threads] = rate;
      log(`wasm reads ${rate.toFixed(1)} GB/s with ${threads} thread${threads === 1 ? "" : "s"} (others used ${foreign.toFixed(2)} cores)`);
    }
    return rates;
  } finally {
    await browser.close();
  }
}

/** Bytes of the largest WebAssembly memory of a page; a worker that is blocked does not answer, but then another does. */
async function wasmBytes(page) {
  const own = await page.evaluate(() => window.memoryBytes());
  if (own !== null) return own;
  const late = () => new Promise((resolve) => setTimeout(resolve, 3000, 0));
  const sizes = page.workers().map((worker) =>
    Promise.race([worker.evaluate("Math.max(0, ...self.benchMemories.map((memory) => memory.buffer.byteLength))").catch(() => 0), late()]),
  );
  return Math.max(0, ...(await Promise.all(sizes))) || null;
}

async function runInBrowser(plan, prompts) {
  const { engine: name, tier, threads, lengths: own = lengths, decodeTokens: decode = decodeTokens } = plan;
  const result = { prefill: {}, foreign: [] };
  const browser = await openBrowser(browserName);
  try {
    const visit = async () => {
      const page = await browser.open(`${sites[threads].url}/`);
      await page.waitForFunction(() => window.loadEngine !== undefined);
      return { page, ...(await page.evaluate((options) => window.loadEngine(options), { name, tier, threads })) };
    };
    const { value: cold } = await sample(async () => await visit(), { ...guard, tries: 1 });
    const { page } = cold;
    result.loadMs = { cold: cold.loadMs, warm: null };
    if (cold.runtime.threads !== threads) throw new Error(`${label(plan)} runs with ${cold.runtime.threads} threads`);
    const chat = (messages, options) => page.evaluate((m, o) => window.chat(m, o), messages, options);
    await chat(prompts.warmup.messages, { maxTokens: 8 });
    for (const length of own) {
      const { value: run, foreign } = await sample(() => chat(prompts[length].messages, { maxTokens: length === 128 || own.length === 1 ? decode : 4 }), guard);
      result.foreign.push(foreign);
      result.prefill[length] = (1000 * length) / run.ttftMs;
      if (run.cachedTokens > 8) log(`${label(plan)}: ${run.cachedTokens} of ${length} prompt tokens came from a cache`);
      if (run.promptTokens !== undefined && Math.abs(run.promptTokens + (run.cachedTokens ?? 0) - length) > length / 2) log(`${label(plan)}: counted ${run.promptTokens} prompt tokens for ${length}`);
      if (run.tokens > 8) result.decode = run.decode;
    }
    if (name === "qandle" && samples[plans.indexOf(plan)].length === 0) {
      const { ids } = prompts[128];
      result.profile = {
        decode: await page.evaluate((i, n) => window.complete(i, n), ids.slice(0, 1), decode),
        prefill: await page.evaluate((i, n) => window.complete(i, n), ids, 1),
      };
    }
    if (!quick && own.length > 1) {
      const first = await chat(prompts.turns.messages, { maxTokens: 64, turn: 1 });
      const messages = [...prompts.turns.messages, { role: "assistant", content: first.text }, { role: "user", content: followUp }];
      const { ttftMs } = await chat(messages, { maxTokens: 4, turn: 2 });
      result.secondTurnTtftMs = ttftMs;
    }
    result.memoryBytes = await wasmBytes(page);
    result.rssBytes = residentBytes(browser.pid, true);
    if (!quick) {
      await page.close();
      const { value: warm } = await sample(async () => await visit(), { ...guard, tries: 1 });
      result.loadMs.warm = warm.loadMs;
    }
    return result;
  } finally {
    await browser.close();
  }
}

/** What a long context costs: attention's rate in the prefill of 2,048 tokens, and decode after 128 and 4,096. */
async function measureContext(plan, prompts) {
  const browser = await openBrowser(browserName);
  try {
    const page = await browser.open(`${sites[plan.threads].url}/`);
    await page.waitForFunction(() => window.loadEngine !== undefined);
    await page.evaluate((options) => window.loadEngine(options), { name: plan.engine, tier: plan.tier, threads: plan.threads, contextLength: 4352 });
    const ids = prompts[512].ids;
    const long = (length) => Array.from({ length }, (_, i) => ids[i % ids.length]);
    const complete = (length, tokens) => page.evaluate((i, n) => window.complete(i, n), long(length), tokens);
    await complete(32, 8);
    const { value: middle } = await sample(() => complete(2048, 1), guard);
    const attention = middle.kernels.find(({ name }) => name === "attention");
    const decode = {};
    for (const length of [128, 4096]) decode[length] = (await sample(() => complete(length, 33), { ...guard, tries: 1 })).value.decode;
    return { tier: plan.tier, threads: plan.threads, attentionGflops: attention.ops / attention.ms / 1e6, decode };
  } finally {
    await browser.close();
  }
}

async function runNative({ threads }, prompts) {
  const folder = await mkdtemp(path.join(os.tmpdir(), "qandle-native-"));
  try {
    const jobs = lengths.map((length) => ({ length, ids: prompts[length].ids, maxTokens: length === 128 ? decodeTokens : 4 }));
    const file = path.join(folder, "job.json");
    await writeFile(file, JSON.stringify({ model, threads, jobs }));
    const { value: stdout, foreign } = await sample(async () => (await promisify(execFile)(process.execPath, [here("native.mjs"), file])).stdout, guard);
    const out = JSON.parse(stdout.trim().split("\n").at(-1));
    const prefill = Object.fromEntries(lengths.map((length) => [length, (1000 * length) / out.results[length].ttftMs]));
    return { prefill, decode: out.results[128].decode, loadMs: { cold: out.loadMs, warm: out.loadMs }, memoryBytes: null, rssBytes: out.rssBytes, foreign: [foreign] };
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

if (!existsSync(model)) throw new Error(`${model} is not there; ./build.sh model fetches it`);
const bytes = await weightBytes(model);
log(`${modelName}: ${(bytes.total / 1e6).toFixed(0)} MB of tensors, ${(bytes.perToken / 1e6).toFixed(0)} MB read for a decoded token`);
const readGBps = await measureBandwidth();
const { prompts, browserVersion } = await makePrompts();
const samples = plans.map(() => []);
const faults = [];
for (let round = 0; round < rounds; round++) {
  for (const [i, plan] of plans.entries()) {
    try {
      const run = await (plan.engine === "llama.cpp-native" ? runNative(plan, prompts[round]) : runInBrowser(plan, prompts[round]));
      samples[i].push(run);
      const rates = Object.entries(run.prefill).map(([length, rate]) => `prefill ${length}: ${rate.toFixed(1)}`);
      log(`round ${round + 1}: ${label(plan)}: ${rates.join(", ")}, decode ${run.decode?.toFixed(1) ?? "-"} tok/s, load ${(run.loadMs.cold / 1000).toFixed(1)} s (others used ${Math.max(...run.foreign).toFixed(2)} cores)`);
    } catch (error) {
      faults.push(`${label(plan)}: ${error.message}`);
      log(`round ${round + 1}: ${label(plan)}: ${error.message}`);
    }
  }
}
const contexts = [];
if (!quick) {
  for (const plan of plans.filter(({ engine, tier, threads }) => engine === "qandle" && tier === "relaxed" && threads === 1)) contexts.push(await measureContext(plan, prompts[0]));
}
await sites[1].close();
await sites[2].close();

const rows = plans.map(({ engine, tier, threads }, i) => {
  const of = (pick) => median(samples[i].map(pick).map((found) => found ?? Number.NaN));
  const memory = samples[i].map(({ memoryBytes }) => memoryBytes).filter((found) => found !== null);
  return {
    engine, tier, threads,
    prefill: Object.fromEntries([32, 128, 512].map((length) => [length, of(({ prefill }) => prefill[length])])),
    decode: of(({ decode }) => decode),
    loadMs: { cold: of(({ loadMs }) => loadMs.cold), warm: of(({ loadMs }) => loadMs.warm) },
    memoryBytes: memory.length === 0 ? null : Math.max(...memory),
    rssBytes: of(({ rssBytes }) => rssBytes),
    secondTurnTtftMs: of(({ secondTurnTtftMs }) => secondTurnTtftMs),
    profile: samples[i][0]?.profile ?? null,
    samples: samples[i].length,
    foreignCores: Math.max(0, ...samples[i].flatMap(({ foreign }) => foreign)),
  };
});
const report = {
  machine: { cpu: os.cpus()[0].model.trim(), cores: os.cpus().length, memoryBytes: os.totalmem(), node: process.version, load1: load1() },
  browser: browserVersion,
  model: { file: modelName, bytes: (await stat(model)).size, tensorBytes: bytes.total, bytesPerToken: bytes.perToken },
  rows,
  readGBps,
  contexts,
};
printTable(report);
const json = value("--json", null);
if (json !== null) await writeFile(json, `${JSON.stringify(report, null, 2)}\n`);
log(`done${json === null ? "" : `, written to ${json}`}`);
for (const fault of faults) console.error(`failed: ${fault}`);
process.exit(faults.length === 0 ? 0 : 1);
