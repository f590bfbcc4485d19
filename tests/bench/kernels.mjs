// `./build.sh bench --kernels`: every type's GEMV and GEMM, quantisation and attention, on one thread in headless
// Chromium, in a table of GOP/s and GB/s.
//   node kernels.mjs FOLDER [--tiers NAME,NAME] [--types NAME,NAME] [--json FILE]
// FOLDER holds kernels_<tier>.js and kernels_<tier>_bg.wasm.
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { openBrowser } from "../browser/harness.mjs";
import { serve } from "../tools/serve.mjs";
import { here, value } from "./options.mjs";

const folder = path.resolve(process.argv[2]);
const tiers = value("--tiers", "simd128,relaxed").split(",");
const only = value("--types", "").split(",").filter(Boolean);
const ms = Number(value("--ms", 300));
const site = await serve({ mounts: { "/": here("site"), "/kernels/": folder } });
const browser = await openBrowser("chromium");
const rows = [];
try {
  for (const tier of tiers) {
    const page = await browser.open(`${site.url}/kernels.html`);
    await page.evaluate((name) => window.start(name), tier);
    const run = (name, ...args) => page.evaluate((f, a) => window.run(f, a), name, args);
    console.log(`\n${tier}, one thread\n  type     bytes/weight   GEMV GOP/s   GB/s   in cache GOP/s   GEMM GOP/s (8 rows)   (128 rows)   (128, 8,960 wide)`);
    for (const type of await run("types")) {
      if (only.length > 0 && !only.includes(type)) continue;
      const [gemv, gbps, size] = await run("product", type, 1, 1536, 96, ms);
      const [cached] = await run("product", type, 1, 1536, 0.4, ms);
      const [gemm8] = await run("product", type, 8, 1536, 3, ms);
      const [gemm] = await run("product", type, 128, 1536, 3, ms);
      const [gemmWide] = await run("product", type, 128, 8960, 3, ms);
      rows.push({ tier, type, bytesPerWeight: size, gemvGops: gemv, gemvGBps: gbps, gemvCachedGops: cached, gemm8Gops: gemm8, gemmGops: gemm, gemmWideGops: gemmWide });
      const cells = [size.toFixed(3).padStart(12), gemv.toFixed(1).padStart(12), gbps.toFixed(1).padStart(6), cached.toFixed(1).padStart(16), gemm8.toFixed(1).padStart(21), gemm.toFixed(1).padStart(12), gemmWide.toFixed(1).padStart(18)];
      console.log(`  ${type.padEnd(8)} ${cells.join(" ")}`);
    }
    for (const [t, k] of [[1, 896], [1, 4864], [128, 896], [128, 4864]]) {
      const took = await run("quantise", t, k, ms / 2);
      console.log(`  quantise ${t} x ${k}: ${(1e6 * took / t / k).toFixed(2)} ns an element`);
    }
    for (const [t, context, heads, kvHeads, d] of [[128, 2048, 14, 2, 64], [2048, 2048, 14, 2, 64], [1, 128, 14, 2, 64], [1, 4096, 14, 2, 64], [128, 2048, 12, 2, 128], [1, 4096, 12, 2, 128]]) {
      const [took, gflops] = await run("attention", t, context, heads, kvHeads, d, ms);
      console.log(`  attention, ${t} queries at ${context}, ${heads}/${kvHeads} heads of ${d}: ${took.toFixed(3)} ms, ${gflops.toFixed(1)} GFLOP/s`);
      rows.push({ tier, attention: { t, context, heads, kvHeads, d }, ms: took, gflops });
    }
    await page.close();
  }
} finally {
  await browser.close();
  await site.close();
}
if (value("--json")) await writeFile(value("--json"), `${JSON.stringify(rows, null, 2)}\n`);
