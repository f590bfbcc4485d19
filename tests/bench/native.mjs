// Native llama.cpp (node-llama-cpp's prebuilt) in a process of its own: reads { model, threads, prompts, decode } from
// the command line, prints the same numbers as the page. Prompts are token ids.
import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const { model: modelPath, threads, jobs } = JSON.parse(readFileSync(process.argv[2], "utf8"));
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, maxThreads: threads, logLevel: "error" });
const began = performance.now();
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const context = await model.createContext({ contextSize: 1024, batchSize: 512, threads: { ideal: threads, min: threads } });
const loadMs = performance.now() - began;
const sequence = context.getSequence();

async function run(ids, maxTokens) {
  await sequence.clearHistory();
  const at = [];
  const start = performance.now();
  for await (const _ of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    at.push(performance.now());
    if (at.length >= maxTokens) break;
  }
  return { ttftMs: at[0] - start, tokens: at.length, decode: at.length > 1 ? (1000 * (at.length - 1)) / (at.at(-1) - at[0]) : null };
}

await run(jobs[0].ids.slice(0, 16), 4);
const results = {};
for (const { length, ids, maxTokens } of jobs) results[length] = await run(ids, maxTokens);
console.log(JSON.stringify({ loadMs, results, version: llama.llamaCppRelease?.release, rssBytes: process.memoryUsage().rss }));
process.exit(0);
