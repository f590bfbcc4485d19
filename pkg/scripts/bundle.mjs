// One file for the page's side and one for each worker: a module that imports others costs a round trip for each step of
// the chain. Glue and wasm stay files of their own, which a switch at run time chooses; so do the places of URLs.
import { readdirSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const file = (name) => fileURLToPath(new URL(name, import.meta.url));
// What was left of an earlier build.
for (const name of readdirSync(file("../dist"))) {
  if (name.endsWith(".js")) rmSync(file(`../dist/${name}`));
}
const options = {
  outdir: file("../dist"),
  bundle: true,
  format: "esm",
  target: "es2022",
  external: ["./wasm/*"],
  logLevel: "warning",
};
const sources = (names) => names.map((name) => file(`../src/${name}.ts`));
// What a page may import side by side has one set of classes; workers have nothing in common.
await build({ ...options, entryPoints: sources(["index", "page", "tiers"]), splitting: true });
await build({ ...options, entryPoints: sources(["worker", "pool", "pool_worker"]) });
