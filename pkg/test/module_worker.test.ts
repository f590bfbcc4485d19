import assert from "node:assert/strict";
import { test } from "node:test";
import { isForeign } from "../src/module_worker.js";

test("only_another_web_origin_is_foreign", () => {
  const before = Object.getOwnPropertyDescriptor(globalThis, "location");
  Object.defineProperty(globalThis, "location", { value: { origin: "https://a.test" }, configurable: true });
  try {
    const found = [
      "https://a.test/x.js",
      "https://b.test/x.js",
      "http://a.test/x.js",
      "file:///build/x.js",
    ].map(isForeign);
    assert.deepEqual(found, [false, true, true, false]);
  } finally {
    if (before === undefined) Reflect.deleteProperty(globalThis, "location");
    else Object.defineProperty(globalThis, "location", before);
  }
});
