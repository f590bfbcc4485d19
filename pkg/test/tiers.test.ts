import assert from "node:assert/strict";
import { test } from "node:test";
import { choose, type Platform, tiers } from "../src/tiers.js";

const PLATFORM: Platform = {
  validate: () => true,
  isolated: true,
  sharedMemory: true,
  cores: 4,
  workers: true,
};
/** Validates by size alone: the relaxed probe is the longer one. */
const simdOnly = (bytes: Uint8Array) => bytes.length < 35;

test("the_best_tier_is_taken_unless_another_is_asked_for", () => {
  assert.equal(choose({}, PLATFORM).tier, "relaxed");
  assert.equal(choose({ tier: "simd128" }, PLATFORM).tier, "simd128");
  assert.equal(choose({}, { ...PLATFORM, validate: simdOnly }).tier, "simd128");
});

test("a_browser_without_simd_or_workers_is_refused", () => {
  const refused = { code: "unsupported_browser" };
  assert.throws(() => choose({}, { ...PLATFORM, validate: undefined }), refused);
  assert.throws(() => choose({}, { ...PLATFORM, validate: () => false }), refused);
  assert.throws(() => choose({ tier: "relaxed" }, { ...PLATFORM, validate: simdOnly }), refused);
  assert.throws(() => choose({}, { ...PLATFORM, workers: false }), refused);
});

test("threads_follow_cores_and_isolation", () => {
  assert.equal(choose({}, PLATFORM).threads, 4);
  assert.equal(choose({}, { ...PLATFORM, cores: 64 }).threads, 8);
  assert.equal(choose({ threads: 12 }, PLATFORM).threads, 12);
  for (const bare of [{ isolated: false }, { sharedMemory: false }]) {
    const plan = choose({ threads: 4 }, { ...PLATFORM, ...bare });
    assert.deepEqual([plan.threads, plan.notices.map(({ code }) => code)], [1, ["not_isolated"]]);
  }
  assert.deepEqual(choose({ threads: 1 }, { ...PLATFORM, isolated: false }).notices, []);
});

test("the_probes_are_modules_that_a_real_engine_accepts", () => {
  const validate = (bytes: Uint8Array<ArrayBuffer>) => WebAssembly.validate(bytes);
  assert.ok(tiers({ ...PLATFORM, validate }).includes("simd128"));
});
