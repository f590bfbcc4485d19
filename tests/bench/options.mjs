// What the benchmark's scripts are called with, and the files that all of them know.
import path from "node:path";
import { fileURLToPath } from "node:url";

/** The file or folder of this name beside the scripts. */
export const here = (name) => fileURLToPath(new URL(name, import.meta.url));

/** What follows an option, as it was written. */
export function value(name, otherwise) {
  const at = process.argv.indexOf(name);
  return at < 0 ? otherwise : process.argv[at + 1];
}

/** What follows an option, as a whole number from 1. */
export function count(name, otherwise) {
  const found = Number(value(name, otherwise));
  if (!Number.isInteger(found) || found < 1) throw new Error(`${name} needs a whole number from 1, not ${value(name)}`);
  return found;
}

/** The model that is measured: the 0.5B, or `--model FILE`. */
export const model = path.resolve(value("--model", here("../../models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")));

/** For `packageSite`: every engine asks for the same name, whatever the model's file is called. */
export const modelSite = (mounts = {}) => ({
  mounts: { "/": here("site"), "/models/": path.dirname(model), ...mounts },
  onRequest: (request) => {
    request.url = request.url.replace("/models/model.gguf", `/models/${path.basename(model)}`);
    return false;
  },
});
