// `./build.sh bench --soak`: many requests of all kinds, one after another, on one engine in Chromium with little room for its
// caches: conversations that come back from the disk, new and repeated questions, streams that are left, forks, deletions.
// Shows wasm memory, JS heaps and rows on disk, and fails where they still grow after the first 100 requests.
//   node soak.mjs [--requests N] [--model FILE] [--threads N] [--json FILE]
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { openBrowser, packagePage, packageSite } from "../browser/harness.mjs";
import { count, here, value } from "./options.mjs";
import { printColumns } from "./table.mjs";

const MiB = 2 ** 20;
/** After so many requests all caches but the tokenizer's are full, whose bounds are some hundred kB. */
const SETTLED = 100;
/** Requests between two looks. */
const EACH = 25;
/** By so much a figure may be larger after the first requests than at its largest before: a leak of 1 kB a request is more. */
const ALLOWED = { wasmBytes: MiB, workerHeapBytes: MiB, pageHeapBytes: MiB, sessionRows: 2, pageRows: 16, otherRows: 2 };

const requests = count("--requests", 1000);
const threads = count("--threads", 1);
const model = path.resolve(value("--model", here("../fixtures/golden/tiny-q4km_h256_untied.gguf")));
if (requests <= SETTLED) throw new Error(`--requests must be more than ${SETTLED}: until then everything may grow`);

const site = await packageSite({ isolated: threads > 1, mounts: { "/soak/": path.dirname(model) } });
const browser = await openBrowser("chromium");

/** Makes the engine and `window.ask(i)`, which sends the request of that number. */
async function prepare({ url, threads }) {
  const MiB = 2 ** 20;
  // One conversation of the tiny model takes some 300 kB.
  const limits = { maxSessions: 8, kvBytes: 1.5 * MiB, diskBytes: 2.5 * MiB, responseBytes: MiB / 16 };
  const engine = await window.qandle.load(url, { threads, warmup: "You are brief.", limits });
  const chats = new Map();
  const system = { role: "system", content: "You are brief." };
  const create = (body, options) => engine.chat.completions.create({ max_tokens: 8, temperature: 0, ...body }, options);
  const talk = async (name, i) => {
    const messages = chats.get(name) ?? [system];
    messages.push({ role: "user", content: `Question ${i}: what is ${i} + ${i % 17}?` });
    const { choices } = await create({ messages, session_id: name });
    messages.push({ role: "assistant", content: choices[0].message.content ?? "" });
    // The conversation begins anew before the context is full.
    if (messages.length > 8) chats.delete(name);
    else chats.set(name, messages);
  };
  const only = (wanted) => (error) => {
    if (error.code !== wanted) throw error;
  };
  const kinds = [
    (i) => talk(`room ${i % 25}`, i),
    (i) => talk(`room ${(i * 7) % 25}`, i),
    () => create({ messages: [system, { role: "user", content: "The same question again." }] }),
    async (i) => {
      const stream = await create({ messages: [{ role: "user", content: `Left ${i}` }], session_id: `left ${i % 5}`, stream: true, max_tokens: 50 });
      for await (const _ of stream) break;
    },
    (i) => create({ messages: [system, { role: "user", content: `Drawn ${i}` }], temperature: 1, seed: i, cache: i % 2 === 0 ? "off" : "refresh" }),
    async (i) => {
      const from = `room ${i % 25}`;
      // It may have left the disk, too.
      await engine.sessions.fork(from, "fork").catch(only("invalid_request"));
      await talk(`room ${(i * 3) % 25}`, i);
      await engine.sessions.delete("fork");
    },
    (i) => create({ messages: [{ role: "user", content: i }] }).catch(only("invalid_request")),
  ];
  window.ask = (i) => kinds[i % kinds.length](i);
  /** Once nothing is left to write. */
  window.rows = async () => {
    for (let i = 0; i < 100 && (await engine.sessions.list()).some(({ where }) => where === "memory"); i++) await new Promise((resolve) => setTimeout(resolve, 50));
    const database = await new Promise((resolve, reject) => {
      const opened = indexedDB.open("qandle");
      opened.onsuccess = () => resolve(opened.result);
      opened.onerror = () => reject(opened.error);
    });
    const counts = {};
    for (const name of database.objectStoreNames) {
      counts[name] = await new Promise((resolve, reject) => {
        const request = database.transaction(name).objectStore(name).count();
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => reject(request.error);
      });
    }
    database.close();
    return { counts, wasmBytes: engine.info.memory.wasmBytes, memory: engine.info.memory };
  };
  window.metrics = () => engine.metrics();
}

async function heapBytes(session) {
  // What a finaliser lets go of is found by the second.
  for (let i = 0; i < 2; i++) await session.send("HeapProfiler.collectGarbage");
  return (await session.send("Runtime.getHeapUsage")).usedSize;
}

async function look(page, own) {
  const { counts, wasmBytes, memory } = await page.evaluate(() => window.rows());
  const { sessions = 0, pages = 0, ...others } = counts;
  let workerHeapBytes = 0;
  for (const worker of page.workers()) workerHeapBytes += await heapBytes(worker.client);
  const otherRows = Object.values(others).reduce((sum, rows) => sum + rows, 0);
  return { wasmBytes, workerHeapBytes, pageHeapBytes: await heapBytes(own), sessionRows: sessions, pageRows: pages, otherRows, kvBytes: memory.kvBytes };
}

const looks = [];
let metrics;
try {
  const page = await packagePage(browser, site);
  const own = await page.createCDPSession();
  await page.run(prepare, { url: `${site.url}/soak/${path.basename(model)}`, threads });
  for (let i = 0; i < requests; i++) {
    await page.run("(i) => window.ask(i)", i);
    if ((i + 1) % EACH !== 0 && i + 1 < requests) continue;
    const found = { requests: i + 1, ...(await look(page, own)) };
    looks.push(found);
    const mb = (bytes) => `${(bytes / 1e6).toFixed(2)} MB`;
    console.log(`${String(i + 1).padStart(5)} requests: wasm ${mb(found.wasmBytes)}, KV ${mb(found.kvBytes)}, heap of the worker ${mb(found.workerHeapBytes)}, of the page ${mb(found.pageHeapBytes)}, rows of sessions ${found.sessionRows}, pages ${found.pageRows}, others ${found.otherRows}`);
  }
  metrics = await page.evaluate(() => window.metrics());
} finally {
  await browser.close();
  await site.close();
}

const most = (key, from) => Math.max(...from.map((found) => found[key]));
const before = looks.filter((found) => found.requests <= SETTLED);
const after = looks.filter((found) => found.requests > SETTLED);
const grown = Object.entries(ALLOWED).map(([key, allowed]) => ({ key, before: most(key, before), after: most(key, after), allowed }));
console.log("");
printColumns([["", `first ${SETTLED}`, "later", "may grow by"], ...grown.map((row) => [row.key, ...[row.before, row.after, row.allowed].map(String)])], 1);
const bad = grown.filter((row) => row.after > row.before + row.allowed);
const { session, response, tokenizer } = metrics.caches;
console.log(`\nhits by look-ups: sessions ${session.hitRate.toFixed(2)}, on disk ${session.disk.hitRate.toFixed(2)} (${session.disk.hits} came back), answers ${response.hitRate.toFixed(2)}, token ids ${tokenizer.hitRate.toFixed(2)}`);
console.log(bad.length === 0 ? `nothing grew after the first ${SETTLED} of ${requests} requests` : bad.map(({ key }) => `${key} grew`).join("\n"));
const json = value("--json");
if (json !== undefined) await writeFile(json, `${JSON.stringify({ model: path.basename(model), browser: browser.version, requests, looks, grown, caches: metrics.caches }, null, 1)}\n`);
process.exit(bad.length === 0 ? 0 : 1);
