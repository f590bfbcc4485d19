// A page is bundled with the files of all tiers; what a quick build leaves out gets a file in its place, so that the
// page builds: the one-thread relaxed build is answered by the simd128 one (same results), a threaded one refuses
// to start, after which the client steps down. A real build of the tier writes over it.  node missing_tiers.mjs DIST/wasm
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";

const folder = process.argv[2];
const has = (name) => readFile(path.join(folder, `${name}.js`), "utf8").then((text) => !text.startsWith("// Not built"), () => false);

/** A module with its name in a custom section: a bundler emits equal files once, and the service worker goes by their names. */
const named = (module, name) => Buffer.concat([module, Buffer.from([0, name.length + 1, name.length]), Buffer.from(name)]);

for (const tier of ["relaxed", "simd128_threads", "relaxed_threads"]) {
  const name = `qandle_${tier}`;
  if (await has(name)) continue;
  const js = path.join(folder, `${name}.js`);
  if (tier === "relaxed" && (await has("qandle_simd128"))) {
    const glue = await readFile(path.join(folder, "qandle_simd128.js"), "utf8");
    await writeFile(js, `// Not built: the simd128 build in its place.\n${glue.replaceAll("qandle_simd128.wasm", `${name}.wasm`)}`);
    const module = await readFile(path.join(folder, "qandle_simd128.wasm"));
    await writeFile(path.join(folder, `${name}.wasm`), named(module, name));
    continue;
  }
  await writeFile(js, `// Not built.
const refuse = () => { throw new Error("the files of ${name} are not part of this build; ./build.sh build makes them"); };
export default refuse;
export const initThreadPool = refuse;
export const wbg_rayon_start_worker = refuse;
export class QandleWorker { constructor() { refuse(); } }
`);
  await writeFile(path.join(folder, `${name}.wasm`), named(Buffer.from([0, 0x61, 0x73, 0x6d, 1, 0, 0, 0]), name));
}
