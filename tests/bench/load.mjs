// `./build.sh bench --load`: from `load` called to an engine that answers, beside wllama, on the same file, in turns: on a
// first visit, on a second, and on a second without the image of the packed weights. Says where our time went.
//   node load.mjs [--model FILE] [--rounds N] [--threads N] [--browser firefox] [--cache KIND] [--json FILE]
import { execFileSync } from "node:child_process";
import { stat, writeFile } from "node:fs/promises";
import path from "node:path";
import { openBrowser, packageSite } from "../browser/harness.mjs";
import { load1, median } from "./guard.mjs";
import { count, here, model, modelSite, value } from "./options.mjs";

const rounds = count("--rounds", 3);
const threads = count("--threads", 1);
const browserName = value("--browser", "chromium");
const { size } = await stat(model);

const site = await packageSite({ isolated: threads > 1, ...modelSite({ "/wllama-2/": here("node_modules/wllama-2/esm") }) });

/** A virtual machine gets memory from its host when it first touches it, and gives it back when it is free: so that a visit is
 * measured as on a real machine, what it will take is touched just before, for peers too. */
const touchMemory = () => execFileSync(process.execPath, ["-e", `Buffer.allocUnsafe(${3 * size}).fill(1)`]);

/** A page that loads; DevTools' copy of every answer, which drivers switch on, is off: users have none. */
async function visit(browser, options, { ask = true, linger = 0 } = {}) {
  const page = await browser.open(`${site.url}/`);
  if (browserName === "chromium") {
    page.on("workercreated", (worker) => worker.client.send("Network.disable").catch(() => {}));
    await page._client().send("Network.disable");
  }
  await page.waitForFunction(() => window.loadEngine !== undefined);
  touchMemory();
  const loaded = await page.evaluate((o) => window.loadEngine(o), options);
  const { ttftMs } = ask ? await page.evaluate(() => window.chat([{ role: "user", content: "What is the capital of France?" }], { maxTokens: 2 })) : {};
  await new Promise((resolve) => setTimeout(resolve, linger));
  await page.close();
  return { ...loaded, firstTokenMs: loaded.loadMs + (ttftMs ?? 0) };
}

const rows = { qandle: { cold: [], image: [], chunks: [] }, "wllama-2.3.1": { cold: [], warm: [] } };
for (let round = 0; round < rounds; round++) {
  for (const name of Object.keys(rows)) {
    const browser = await openBrowser(browserName);
    try {
      const options = { name, tier: "relaxed", threads, cache: value("--cache", "auto") };
      // Ours writes the image when it has been idle for some seconds.
      const cold = await visit(browser, options, { linger: name === "qandle" ? 6000 + size / 1e5 : 0 });
      rows[name].cold.push(cold);
      for (const kind of Object.keys(rows[name]).slice(1)) {
        const warm = await visit(browser, { ...options, fastImage: kind === "image" });
        if (kind !== "warm" && warm.load.source !== (kind === "image" ? "image" : "cache")) throw new Error(`the ${kind} load came from ${warm.load.source}`);
        rows[name][kind].push(warm);
      }
    } finally {
      await browser.close();
    }
    const last = Object.entries(rows[name]).map(([kind, list]) => `${kind} ${(list.at(-1).loadMs / 1000).toFixed(2)} s`);
    console.log(`round ${round + 1}, ${name}: ${last.join(", ")} (load ${load1().toFixed(1)})`);
  }
}
await site.close();

const peer = rows["wllama-2.3.1"];
const of = (list, key = "loadMs") => median(list.map((row) => row[key]));
console.log(`\n${path.basename(model)}, ${browserName}, ${threads} thread${threads === 1 ? "" : "s"}, medians of ${rounds}; × is against wllama 2.3.1 on the same visit`);
const line = (kind, against, beside) => {
  const ours = of(rows.qandle[kind]);
  const spent = rows.qandle[kind][Math.floor(rounds / 2)].load.ms;
  const parts = Object.entries(spent).filter(([name]) => name !== "total").map(([name, ms]) => `${name} ${ms.toFixed(0)}`);
  console.log(`  ${beside.padEnd(28)} ${ours.toFixed(0).padStart(6)} ms  ${(ours / of(against)).toFixed(2)}×  (${parts.join(", ")})`);
};
line("cold", peer.cold, "first visit");
line("image", peer.warm, "second visit, image");
line("chunks", peer.warm, "second visit, no image");
const first = of(rows.qandle.image, "firstTokenMs");
console.log(`  ${"second visit to first token".padEnd(28)} ${first.toFixed(0).padStart(6)} ms  ${(first / of(peer.warm)).toFixed(2)}× of wllama's load alone`);
console.log(`  wllama 2.3.1: first visit ${of(peer.cold).toFixed(0)} ms, second ${of(peer.warm).toFixed(0)} ms`);
const json = value("--json");
if (json !== undefined) await writeFile(json, JSON.stringify({ browser: browserName, model: path.basename(model), threads, rows }, null, 1));
