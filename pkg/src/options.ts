// Checks load options by name, so that a misspelt or senseless one is told and not silently ignored.

import { failure } from "./errors.js";
import { WIRE_OPTIONS, type WireLoadOptions } from "./protocol.js";
import type { LoadOptions } from "./types.js";

type Check = { ok(value: unknown): boolean; wanted: string };

const oneOf = (...names: string[]): Check => ({
  ok: (value) => typeof value === "string" && names.includes(value),
  wanted: `one of ${names.map((name) => `"${name}"`).join(", ")}`,
});
const integer = (value: unknown, min: number, max: number) =>
  typeof value === "number" && Number.isInteger(value) && value >= min && value <= max;
const fn: Check = { ok: (value) => typeof value === "function", wanted: "a function" };
const record = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

const MAX_CONTEXT = 1 << 20;
const MAX_THREADS = 64;
const MAX_PHRASES = 256;
const MAX_PHRASE_BYTES = 256 << 10;
const LIMITS = [
  "maxSessions",
  "sessionTtlSeconds",
  "kvBytes",
  "memoryBytes",
  "responseBytes",
  "diskBytes",
  "maxInputTokens",
  "maxBatchSize",
];

const CHECKS: Record<keyof LoadOptions, Check> = {
  onProgress: fn,
  onNotice: fn,
  onMetrics: fn,
  signal: { ok: (value) => value instanceof AbortSignal, wanted: "an AbortSignal" },
  contextLength: {
    ok: (value) => integer(value, 1, MAX_CONTEXT),
    wanted: `an integer from 1 to ${MAX_CONTEXT}`,
  },
  window: {
    ok: (value) => integer(value, 1, MAX_CONTEXT),
    wanted: `an integer from 1 to ${MAX_CONTEXT}`,
  },
  threads: {
    ok: (value) => value === "auto" || integer(value, 1, MAX_THREADS),
    wanted: `"auto" or an integer from 1 to ${MAX_THREADS}`,
  },
  tier: oneOf("auto", "simd128", "relaxed"),
  cache: oneOf("auto", "cache-api", "indexeddb", "none"),
  fastImage: { ok: (value) => typeof value === "boolean", wanted: "a boolean" },
  kv: oneOf("f16", "f32", "q8"),
  warmup: {
    ok: (value) => typeof value === "boolean" || typeof value === "string",
    wanted: "a boolean or a text",
  },
  normalize: { ok: (value) => typeof value === "boolean", wanted: "a boolean" },
  limits: {
    ok: (value) =>
      record(value) &&
      Object.entries(value).every(
        ([key, limit]) =>
          LIMITS.includes(key) &&
          (limit === undefined ||
            (typeof limit === "number" &&
              limit >= 0 &&
              (key === "sessionTtlSeconds" ? limit < Infinity : Number.isSafeInteger(limit)))),
      ),
    wanted: `an object of whole numbers, zero or more, with the keys ${LIMITS.join(", ")}`,
  },
  phrases: {
    ok: (value) =>
      Array.isArray(value) &&
      value.length <= MAX_PHRASES &&
      value.every((phrase) => typeof phrase === "string") &&
      value.reduce((sum, phrase) => sum + phrase.length, 0) <= MAX_PHRASE_BYTES,
    wanted: `a list of at most ${MAX_PHRASES} texts of ${MAX_PHRASE_BYTES} bytes in all`,
  },
  speculation: { ok: (value) => typeof value === "boolean", wanted: "a boolean" },
  mirrors: {
    ok: (value) =>
      record(value) &&
      Object.entries(value).every(
        ([key, hosts]) =>
          (key === "hf" || key === "ms") &&
          (hosts === undefined ||
            (Array.isArray(hosts) && hosts.length > 0 && hosts.every((host) => typeof host === "string"))),
      ),
    wanted: "an object with lists of URLs under `hf` or `ms`",
  },
  assetsUrl: { ok: (value) => typeof value === "string" || value instanceof URL, wanted: "a URL" },
};

/** Rejects what is unknown or out of range with `invalid_request`, naming the option. */
export function checkOptions(options: LoadOptions): void {
  if (!record(options)) throw failure("invalid_request", "the options must be an object");
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined) continue;
    const check = Object.hasOwn(CHECKS, name) ? CHECKS[name as keyof LoadOptions] : undefined;
    if (check === undefined)
      throw failure("invalid_request", `unknown option "${name}"`, { detail: { field: name } });
    if (check.ok(value)) continue;
    const found =
      typeof value === "object" ? "an object that is not" : (JSON.stringify(value) ?? typeof value);
    throw failure("invalid_request", `the option ${name} must be ${check.wanted}; found ${found}`, {
      detail: { field: name },
    });
  }
}

/** The part of the options that the worker reads. */
export function wireOptions(options: LoadOptions): WireLoadOptions {
  return Object.fromEntries(
    WIRE_OPTIONS.filter((name) => options[name] !== undefined).map((name) => [name, options[name]]),
  );
}
