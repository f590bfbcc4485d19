// Before packing: all four builds are there and none is a stand-in that `./build.sh serve` left for an absent one.

import { readFileSync, statSync } from "node:fs";
import { fileURLToPath } from "node:url";

const LEAST_BYTES = 1_000_000;
const size = (name) =>
  statSync(fileURLToPath(new URL(`../dist/wasm/${name}.wasm`, import.meta.url)), { throwIfNoEntry: false })
    ?.size ?? 0;
const names = ["simd128", "relaxed", "simd128_threads", "relaxed_threads"].map((tier) => `qandle_${tier}`);
const isStandIn = (name) =>
  readFileSync(fileURLToPath(new URL(`../dist/wasm/${name}.js`, import.meta.url)), "utf8").startsWith(
    "// Not built",
  );
const missing = names.filter((name) => size(name) < LEAST_BYTES || isStandIn(name));
if (size("qandle_page") === 0) missing.push("qandle_page");
if (missing.length > 0) {
  console.error(
    `dist/ is not whole: ${missing.join(", ")} not built. Run ./build.sh build --publish, then pack again.`,
  );
  process.exit(1);
}
