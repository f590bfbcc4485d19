// Adds up what the test runners said: node tally.mjs LOG STATUS prints "PASSED FAILED". Knows the summary lines of
// cargo test (and wasm-bindgen's runner, which prints the same), cargo nextest and node --test.
import { readFileSync } from "node:fs";

const [, , log, status] = process.argv;
const text = readFileSync(log, "utf8").replace(/\x1b\[[0-9;]*m/g, "");
let passed = 0;
let failed = 0;
const add = (pattern, into) => {
  for (const match of text.matchAll(pattern)) into(Number(match[1]), Number(match[2] ?? 0));
};
add(/^test result: \w+\. (\d+) passed; (\d+) failed/gm, (p, f) => { passed += p; failed += f; });
add(/^\s*Summary .*?(\d+) passed(?:.*?(\d+) failed)?/gm, (p, f) => { passed += p; failed += f; });
add(/^(?:#|ℹ) pass (\d+)$/gm, (p) => { passed += p; });
add(/^(?:#|ℹ) (?:fail|cancelled) (\d+)$/gm, (f) => { failed += f; });

// A runner that ended badly, or that ran nothing at all, is itself a failure.
if (failed === 0 && (status !== "0" || passed === 0)) failed = 1;
console.log(`${passed} ${failed}`);
