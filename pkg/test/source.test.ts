import assert from "node:assert/strict";
import { test } from "node:test";
import { resolveSource } from "../src/source.js";
import type { ModelSource } from "../src/types.js";

test("hub_forms_become_urls", () => {
  const cases: [string, string][] = [
    ["hf:a/b/c.gguf", "https://huggingface.co/a/b/resolve/main/c.gguf"],
    ["hf:a/b/d/e f.gguf@v1.0", "https://huggingface.co/a/b/resolve/v1.0/d/e%20f.gguf"],
    ["hf:a/b/c.gguf@refs/pr/3", "https://huggingface.co/a/b/resolve/refs%2Fpr%2F3/c.gguf"],
    ["ms:a/b/c.gguf", "https://modelscope.cn/models/a/b/resolve/master/c.gguf"],
  ];
  for (const [source, url] of cases) assert.deepEqual(resolveSource(source), [{ url }]);
});

test("mirrors_take_the_place_of_the_hub_they_are_for", () => {
  const mirrors = { hf: ["https://one.example", "https://two.example/base"] };
  assert.deepEqual(resolveSource("hf:a/b/c.gguf", mirrors), [
    { url: "https://one.example/a/b/resolve/main/c.gguf" },
    { url: "https://two.example/base/a/b/resolve/main/c.gguf" },
  ]);
  assert.match(JSON.stringify(resolveSource("ms:a/b/c.gguf", mirrors)), /modelscope/);
});

test("urls_hashes_and_blobs_pass", () => {
  const sha256 = "AB".repeat(32);
  const blob = new Blob(["x"]);
  assert.deepEqual(resolveSource("https://h/m.gguf?x=1"), [{ url: "https://h/m.gguf?x=1" }]);
  assert.deepEqual(resolveSource({ url: ["hf:a/b/c"], sha256 }), [
    { url: "https://huggingface.co/a/b/resolve/main/c", sha256: "ab".repeat(32) },
  ]);
  assert.deepEqual(resolveSource(blob), [{ blob }]);
  assert.deepEqual(resolveSource([blob]), [{ blob }]);
});

test("what_cannot_be_served_is_refused_by_name", () => {
  const refused: [unknown, string][] = [
    ["hf:", "invalid_request"],
    ["hf:a/b", "invalid_request"],
    ["hf:a/../c.gguf", "invalid_request"],
    ["hf:a/b/c.gguf@", "invalid_request"],
    ["ftp://h/m.gguf", "invalid_request"],
    ["m.gguf", "invalid_request"], // relative, and there is no page here
    ["", "invalid_request"],
    [5, "invalid_request"],
    [{}, "invalid_request"],
    [[], "invalid_request"],
    [{ url: 5 }, "invalid_request"],
    [{ url: "https://h/m", sha256: "12" }, "invalid_request"],
    [{ url: ["https://h/1", "https://h/2"] }, "unsupported_model"],
    [{ config: "c", tokenizer: "t", weights: "w" }, "unsupported_model"],
  ];
  for (const [source, code] of refused) {
    assert.throws(() => resolveSource(source as ModelSource), { code }, JSON.stringify(source));
  }
});
