// Removes the folders named on the command line, inside this package only. Never `dist`: the build puts wasm there.
import { rmSync } from "node:fs";
import { resolve, sep } from "node:path";

const root = resolve(import.meta.dirname, "..");
for (const name of process.argv.slice(2)) {
  const path = resolve(root, name);
  if (!path.startsWith(root + sep)) throw new Error(`${name} is outside the package`);
  rmSync(path, { recursive: true, force: true });
}
