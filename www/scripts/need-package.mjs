// Says what is missing before Vite fails on an import that it cannot resolve.
import { existsSync } from "node:fs";
import { resolve } from "node:path";

const dist = resolve(import.meta.dirname, "../../pkg/dist");
const tiers = ["simd128", "simd128_threads", "relaxed", "relaxed_threads", "page"];
const files = ["index.js", "index.d.ts", "page.js", "worker.js"];
for (const tier of tiers) files.push(`wasm/qandle_${tier}.js`, `wasm/qandle_${tier}.wasm`);

const missing = files.filter((file) => !existsSync(resolve(dist, file)));
if (missing.length > 0) {
  console.error(
    `The page needs the built package, but pkg/dist has no ${missing.join(", ")}.\nRun ./build.sh build first.`,
  );
  process.exit(1);
}
