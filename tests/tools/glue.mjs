// Puts what wasm-bindgen made of one build into the package: node glue.mjs NAME FROM WASM TO
// NAME.js and NAME.wasm, without the snippets folder. The glue of a threaded build takes its pool from the package's
// own pool.js, which works with and without a bundler.
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import path from "node:path";

const [, , name, from, wasm, to] = process.argv;
const threaded = name.endsWith("_threads");
let glue = await readFile(path.join(from, `${name}.js`), "utf8");

function replaceAll(pattern, by, atLeast) {
  const found = glue.match(pattern)?.length ?? 0;
  if (found < atLeast) throw new Error(`${name}.js has ${found} matches of ${pattern}, expected ${atLeast}: has wasm-bindgen's output changed?`);
  glue = glue.replace(pattern, by);
}

replaceAll(new RegExp(`${name}_bg\\.wasm`, "g"), `${name}.wasm`, 1);
replaceAll(/(["'])\.\/snippets\/wasm-bindgen-rayon-[^"']*\1/g, '"../pool.js"', threaded ? 1 : 0);
if (glue.includes("./snippets/")) throw new Error(`${name}.js imports a snippet that the package does not hold`);

await mkdir(to, { recursive: true });
await writeFile(path.join(to, `${name}.js`), glue);
await copyFile(wasm, path.join(to, `${name}.wasm`));
