// From what the caller names to what the worker opens: `hf:` and `ms:` forms become URLs, blobs pass, and what is not
// served is refused by name. Nothing is fetched here.

import { failure } from "./errors.js";
import type { WireSource } from "./protocol.js";
import type { LoadOptions, ModelSource } from "./types.js";

type Hub = "hf" | "ms";
type Mirrors = LoadOptions["mirrors"];

const HUBS: Record<Hub, { base: string; path: string; revision: string }> = {
  hf: { base: "https://huggingface.co/", path: "", revision: "main" },
  ms: { base: "https://modelscope.cn/", path: "models/", revision: "master" },
};

const FETCHABLE = new Set(["http:", "https:", "blob:", "data:"]);

/** The places to try, in order; at least one. A hub form has one for each mirror. */
export function resolveSource(source: ModelSource, mirrors: Mirrors = {}): WireSource[] {
  if (typeof source === "string") return urls(source, mirrors).map((url) => ({ url }));
  if (isBlob(source)) return [{ blob: source }];
  if (Array.isArray(source)) return [{ blob: single(source, "files") }];
  if (typeof source === "object" && source !== null && "url" in source) {
    const sha256 = checkSha256(source.sha256);
    const url = Array.isArray(source.url) ? single(source.url, "URLs") : source.url;
    return urls(url, mirrors).map((url) => (sha256 === undefined ? { url } : { url, sha256 }));
  }
  if (typeof source === "object" && source !== null && "weights" in source) {
    throw failure("unsupported_model", "safetensors sources are not served in this version: use a GGUF file");
  }
  throw failure("invalid_request", "the source must be a URL, a Blob or File, or an object with `url`");
}

function single<T>(parts: T[], what: string): T {
  const [first, second] = parts;
  if (first === undefined) throw failure("invalid_request", `the source is an empty list of ${what}`);
  if (second !== undefined) {
    throw failure(
      "unsupported_model",
      `a model in several ${what} is not served in this version: join the shards into one GGUF file`,
      { detail: { found: parts.length } },
    );
  }
  return first;
}

function urls(text: string, mirrors: Mirrors): string[] {
  if (typeof text !== "string") throw failure("invalid_request", "the source's `url` must be a string");
  const hub = /^(hf|ms):(.*)$/s.exec(text);
  if (hub !== null) return hubUrls(hub[1] === "ms" ? "ms" : "hf", hub[2] ?? "", mirrors);
  return [absolute(text, `the source "${text}"`)];
}

/** `owner/repo/path/in/repo[@revision]` at each of the hub's hosts. */
function hubUrls(hub: Hub, rest: string, mirrors: Mirrors): string[] {
  const at = rest.lastIndexOf("@");
  const { base, path, revision } = HUBS[hub];
  const [owner = "", repo = "", ...file] = (at < 0 ? rest : rest.slice(0, at)).split("/");
  const wanted = at < 0 ? revision : rest.slice(at + 1);
  const sound = [owner, repo, wanted, ...file].every((part) => part !== "" && part !== "." && part !== "..");
  if (!sound || file.length === 0) {
    throw failure(
      "invalid_request",
      `"${hub}:${rest}" must read "${hub}:owner/repo/path/to/file.gguf[@revision]"`,
    );
  }
  const tail = [owner, repo, "resolve", wanted, ...file].map(encodeURIComponent).join("/");
  const hosts = mirrors?.[hub] ?? [base];
  return hosts.map((host) => `${withSlash(absolute(host, `the mirror "${host}"`))}${path}${tail}`);
}

function absolute(text: string, what: string): string {
  const here = globalThis.document?.baseURI ?? globalThis.location?.href;
  let url: URL;
  try {
    url = new URL(text, here);
  } catch (cause) {
    throw failure("invalid_request", `${what} is not a URL`, { cause });
  }
  if (!FETCHABLE.has(url.protocol))
    throw failure("invalid_request", `${what} cannot be fetched (${url.protocol})`);
  return url.href;
}

/** The URL as a folder. */
export function withSlash(url: string): string {
  return url.endsWith("/") ? url : `${url}/`;
}

function checkSha256(sha256: string | undefined): string | undefined {
  if (sha256 === undefined) return undefined;
  if (typeof sha256 !== "string" || !/^[0-9a-f]{64}$/i.test(sha256)) {
    throw failure("invalid_request", "`sha256` must be 64 hexadecimal digits", { detail: { found: sha256 } });
  }
  return sha256.toLowerCase();
}

function isBlob(source: unknown): source is Blob {
  return typeof Blob === "function" && source instanceof Blob;
}
