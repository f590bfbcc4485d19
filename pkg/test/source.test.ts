import assert from "node:assert/strict";
import { test } from "node:test";
import { filesOfPlace, nameOf, resolveSource } from "../src/source.js";
import type { ModelSource } from "../src/types.js";

test("hub_forms_become_urls", () => {
  const cases: [string, string, string][] = [
    ["hf:a/b/c.gguf", "https://huggingface.co/a/b/resolve/main/c.gguf", "hf:a/b/c.gguf@main"],
    [
      "hf:a/b/d/e f.gguf@v1.0",
      "https://huggingface.co/a/b/resolve/v1.0/d/e%20f.gguf",
      "hf:a/b/d/e f.gguf@v1.0",
    ],
    [
      "hf:a/b/c.gguf@refs/pr/3",
      "https://huggingface.co/a/b/resolve/refs%2Fpr%2F3/c.gguf",
      "hf:a/b/c.gguf@refs/pr/3",
    ],
    ["ms:a/b/c.gguf", "https://modelscope.cn/models/a/b/resolve/master/c.gguf", "ms:a/b/c.gguf@master"],
  ];
  for (const [source, url, key] of cases) assert.deepEqual(resolveSource(source), [{ url, key }]);
});

test("mirrors_take_the_place_of_the_hub_they_are_for", () => {
  const mirrors = { hf: ["https://one.example", "https://two.example/base"] };
  assert.deepEqual(resolveSource("hf:a/b/c.gguf", mirrors), [
    { url: "https://one.example/a/b/resolve/main/c.gguf", key: "hf:a/b/c.gguf@main" },
    { url: "https://two.example/base/a/b/resolve/main/c.gguf", key: "hf:a/b/c.gguf@main" },
  ]);
  assert.match(JSON.stringify(resolveSource("ms:a/b/c.gguf", mirrors)), /modelscope/);
});

test("urls_hashes_and_blobs_pass", () => {
  const sha256 = "AB".repeat(32);
  const blob = new Blob(["x"]);
  assert.deepEqual(resolveSource("https://h/m.gguf?x=1"), [{ url: "https://h/m.gguf?x=1" }]);
  assert.deepEqual(resolveSource({ url: ["hf:a/b/c"], sha256 }), [
    { url: "https://huggingface.co/a/b/resolve/main/c", key: "hf:a/b/c@main", sha256: "ab".repeat(32) },
  ]);
  assert.deepEqual(resolveSource(blob), [{ blob }]);
  assert.deepEqual(resolveSource([blob]), [{ blob }]);
});

test("the_next_visit_knows_a_source_by_the_same_name", () => {
  const name = (source: ModelSource, mirrors?: { hf: string[] }) => nameOf(resolveSource(source, mirrors));
  assert.equal(name("hf:a/b/c.gguf"), name("hf:a/b/c.gguf@main", { hf: ["https://one.example"] }));
  assert.notEqual(name("hf:a/b/c.gguf"), name("hf:a/b/c.gguf@v2"));
  assert.equal(name("https://h/m.gguf"), "https://h/m.gguf");
  assert.equal(name({ url: "https://h/m.gguf", sha256: "0".repeat(64) }), "https://h/m.gguf");
  const file = (text: string) => new File([text], "m.gguf", { lastModified: 5 });
  assert.equal(name(file("one")), name(file("two")));
  assert.notEqual(name(file("one")), name(file("three")));
  assert.equal(name(`https://h/${"x".repeat(5000)}`)?.length, 1000);
  for (const unnamed of ["blob:https://h/0-1", "data:,x"]) assert.equal(name(unnamed), null);
  assert.equal(nameOf([]), null);
});

test("what_cannot_be_served_is_refused_by_name", () => {
  const refused: [unknown, string][] = [
    ["hf:", "invalid_request"],
    ["hf:a/b", "invalid_request"],
    ["hf:a/../c.gguf", "invalid_request"],
    ["hf:a/b/c.gguf@", "invalid_request"],
    ["hf:a/b/\ud800.gguf", "invalid_request"],
    ["ftp://h/m.gguf", "invalid_request"],
    ["m.gguf", "invalid_request"], // relative, and there is no page here
    ["", "invalid_request"],
    [5, "invalid_request"],
    [{}, "invalid_request"],
    [[], "invalid_request"],
    [{ url: 5 }, "invalid_request"],
    [{ url: "https://h/m", sha256: "12" }, "invalid_request"],
    [{ url: [] }, "invalid_request"],
    [{ url: ["https://h/1", "https://h/2"], sha256: "0".repeat(64) }, "invalid_request"],
    [["https://h/1", "https://h/2"], "invalid_request"],
    [{ config: "https://h/c", tokenizer: "https://h/t", weights: [] }, "invalid_request"],
    [{ config: "https://h/c", weights: "https://h/w" }, "invalid_request"],
    [
      { config: { url: ["https://h/1", "https://h/2"] }, tokenizer: "https://h/t", weights: "https://h/w" },
      "invalid_request",
    ],
    [
      { config: "https://h/c", tokenizer: "https://h/t", weights: "https://h/w", quantize: "q2_k" },
      "invalid_request",
    ],
  ];
  for (const [source, code] of refused) {
    assert.throws(() => resolveSource(source as ModelSource), { code }, JSON.stringify(source));
  }
});

test("several_files_are_named_at_each_mirror", () => {
  const mirrors = { hf: ["https://one/", "https://two/"] };
  const shards = resolveSource({ url: ["hf:o/r/1.gguf", "hf:o/r/2.gguf"] }, mirrors);
  assert.deepEqual(
    shards.map((place) => filesOfPlace(place).needed.map((file) => ("url" in file ? file.url : ""))),
    ["https://one/", "https://two/"].map((host) => [1, 2].map((i) => `${host}o/r/resolve/main/${i}.gguf`)),
  );
  const blobs = [new Blob(["a"]), new Blob(["b"])];
  assert.deepEqual(resolveSource(blobs), [{ files: blobs.map((blob) => ({ blob })) }]);
});

test("small_files_are_looked_for_beside_a_tokenizer_and_a_config", () => {
  const [place] = resolveSource({
    config: "https://h/r/config.json?x",
    tokenizer: "hf:o/r/tokenizer.json@v1",
    weights: ["https://h/r/1.safetensors", new Blob()],
    quantize: "q8_0",
  });
  assert.ok(place !== undefined && "config" in place);
  assert.equal(place.quantize, "q8_0");
  assert.equal(place.files.length, 2);
  const { needed, optional } = filesOfPlace(place);
  assert.equal(needed.length, 4);
  assert.deepEqual(
    optional.map((file) => ("url" in file ? (file.key ?? file.url) : "")),
    [
      "hf:o/r/tokenizer_config.json@v1",
      "hf:o/r/chat_template.jinja@v1",
      "https://h/r/generation_config.json?x",
    ],
  );
  const [plain] = resolveSource({ config: "https://h/c", tokenizer: new Blob(), weights: "https://h/w" });
  assert.ok(plain !== undefined);
  assert.deepEqual(filesOfPlace(plain).optional, []);
});
