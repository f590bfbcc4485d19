// From what the caller names to what the worker opens: `hf:` and `ms:` forms become URLs with one key, blobs pass, and what
// is not served is refused by name. Nothing is fetched here.

import { failure } from "./errors.js";
import type { WireFile, WireRepository, WireSource } from "./protocol.js";
import type { LoadOptions, ModelSource } from "./types.js";

type Hub = "hf" | "ms";
type Mirrors = LoadOptions["mirrors"];

const HUBS: Record<Hub, { base: string; path: string; revision: string }> = {
  hf: { base: "https://huggingface.co/", path: "", revision: "main" },
  ms: { base: "https://modelscope.cn/", path: "models/", revision: "master" },
};

const FETCHABLE = new Set(["http:", "https:", "blob:", "data:"]);

/** Half a character, which no URL can spell. */
const LONE_SURROGATE = /\p{Surrogate}/u;

/** Letters of a source's name that count. */
const MAX_NAME = 1000;

/** Small files beside those that are named: where one of these ends a URL, the others are looked for at its side. */
const BESIDE = {
  tokenizerConfig: ["tokenizer.json", "tokenizer_config.json"],
  chatTemplate: ["tokenizer.json", "chat_template.jinja"],
  generationConfig: ["config.json", "generation_config.json"],
} as const;

/** The places to try, in order; at least one. A hub form has one for each mirror. */
export function resolveSource(source: ModelSource, mirrors: Mirrors = {}): WireSource[] {
  if (isRecord(source) && "weights" in source) return repositories(source, mirrors);
  const sha256 = isRecord(source) && "url" in source ? checkSha256(source.sha256) : undefined;
  const files = filesOf(source, mirrors);
  const [first, ...others] = files;
  if (first === undefined) throw failure("invalid_request", "the source is an empty list of files");
  if (others.length === 0) return first.map((file) => (sha256 === undefined ? file : { ...file, sha256 }));
  if (sha256 !== undefined)
    throw failure("invalid_request", "`sha256` is that of one file, but the source has several");
  return abreast(files).map((part) => ({ files: part }));
}

/** All files of a place, those that may be missing last. */
export function filesOfPlace(place: WireSource): { needed: WireFile[]; optional: WireFile[] } {
  if (!("files" in place)) return { needed: [place], optional: [] };
  if (!("config" in place)) return { needed: place.files, optional: [] };
  const { files, config, tokenizer, tokenizerConfig, chatTemplate, generationConfig } = place;
  const optional = [tokenizerConfig, chatTemplate, generationConfig].filter((file) => file !== undefined);
  return { needed: [...files, config, tokenizer], optional };
}

type Repository = Extract<ModelSource, { weights: unknown }>;

/** Safetensors with the files beside them, at each mirror. */
function repositories(source: Repository, mirrors: Mirrors): WireRepository[] {
  const { quantize, weights } = source;
  if (quantize !== undefined && !["none", "q8_0", "q4_0"].includes(quantize)) {
    throw failure("invalid_request", "`quantize` must be none, q8_0 or q4_0", {
      detail: { found: quantize },
    });
  }
  const one = (name: "config" | "tokenizer" | keyof typeof BESIDE): WireFile[] | undefined => {
    const given = source[name];
    if (given === undefined) return undefined;
    const [places, ...more] = filesOf(given, mirrors);
    if (places === undefined || more.length > 0)
      throw failure("invalid_request", `\`${name}\` must be one file`);
    return places;
  };
  const [config, tokenizer] = [one("config"), one("tokenizer")];
  if (config === undefined || tokenizer === undefined)
    throw failure("invalid_request", "safetensors need a `config` and a `tokenizer`");
  const list = Array.isArray(weights)
    ? weights.flatMap((each) => filesOf(each, mirrors))
    : filesOf(weights, mirrors);
  if (list.length === 0) throw failure("invalid_request", "`weights` is an empty list of files");
  const beside = (name: keyof typeof BESIDE): WireFile[] | undefined => {
    const [from, to] = BESIDE[name];
    return one(name) ?? siblings(from === "config.json" ? config : tokenizer, { from, to });
  };
  const optional = {
    tokenizerConfig: beside("tokenizerConfig"),
    chatTemplate: beside("chatTemplate"),
    generationConfig: beside("generationConfig"),
  };
  return abreast([config, tokenizer, ...list]).map(([c, t, ...files], i) => ({
    files,
    config: c as WireFile,
    tokenizer: t as WireFile,
    ...Object.fromEntries(
      Object.entries(optional).flatMap(([name, places]) => {
        const place = places && at(places, i);
        return place === undefined ? [] : [[name, place]];
      }),
    ),
    ...(quantize === undefined ? {} : { quantize }),
  }));
}

/** Files of another name beside these, where they have the name that is expected. */
function siblings(files: WireFile[], { from, to }: { from: string; to: string }): WireFile[] | undefined {
  const found = files.flatMap((file) => {
    if ("blob" in file) return [];
    const url = new URL(file.url);
    if (!url.pathname.endsWith(`/${from}`)) return [];
    url.pathname = url.pathname.slice(0, -from.length) + to;
    if (file.key === undefined) return [{ url: url.href }];
    return [{ url: url.href, key: file.key.replace(new RegExp(`${from}(?=@[^@]*$)`), to) }];
  });
  return found.length === 0 ? undefined : found;
}

/** The places of each file of a source. */
function filesOf(source: ModelSource, mirrors: Mirrors): WireFile[][] {
  if (typeof source === "string") return [places(source, mirrors)];
  if (isBlob(source)) return [[{ blob: source }]];
  if (Array.isArray(source)) {
    if (!source.every(isBlob))
      throw failure("invalid_request", "a list as the source must hold Files or Blobs; URLs go into `url`");
    return source.map((blob) => [{ blob }]);
  }
  if (isRecord(source) && "url" in source) {
    return (Array.isArray(source.url) ? source.url : [source.url]).map((url) => places(url, mirrors));
  }
  throw failure("invalid_request", "the source must be a URL, a Blob or File, or an object with `url`");
}

/** Of several files, the first place of each, then the second …; who has fewer repeats the last. */
function abreast(files: WireFile[][]): WireFile[][] {
  const most = Math.max(...files.map((each) => each.length));
  return Array.from({ length: most }, (_, i) => files.flatMap((each) => at(each, i) ?? []));
}

function at(files: WireFile[], i: number): WireFile | undefined {
  return files[Math.min(i, files.length - 1)];
}

function isRecord(source: unknown): source is Exclude<ModelSource, string | Blob | Blob[]> {
  return typeof source === "object" && source !== null && !Array.isArray(source) && !isBlob(source);
}

/**
 * What the next visit knows a source by: the same for every mirror of a hub, and for a file of the device that is picked
 * again. Null for what only this page can name.
 */
export function nameOf([place]: WireSource[]): string | null {
  const file = place && filesOfPlace(place).needed[0];
  if (file === undefined) return null;
  const name = "blob" in file ? blobName(file.blob) : (file.key ?? file.url);
  return /^(blob|data):/.test(name) ? null : name.slice(0, MAX_NAME);
}

function blobName(blob: Blob): string {
  const isFile = typeof File === "function" && blob instanceof File;
  return isFile ? `file:${blob.size}:${blob.lastModified}:${blob.name}` : `file:${blob.size}`;
}

function places(text: string, mirrors: Mirrors): { url: string; key?: string }[] {
  if (typeof text !== "string") throw failure("invalid_request", "the source's `url` must be a string");
  const hub = /^(hf|ms):(.*)$/s.exec(text);
  if (hub !== null) return hubPlaces(hub[1] === "ms" ? "ms" : "hf", hub[2] ?? "", mirrors);
  return [{ url: absolute(text, `the source "${text}"`) }];
}

/** `owner/repo/path/in/repo[@revision]` at each of the hub's hosts. */
function hubPlaces(hub: Hub, rest: string, mirrors: Mirrors): { url: string; key: string }[] {
  const at = rest.lastIndexOf("@");
  const { base, path, revision } = HUBS[hub];
  const [owner = "", repo = "", ...file] = (at < 0 ? rest : rest.slice(0, at)).split("/");
  const wanted = at < 0 ? revision : rest.slice(at + 1);
  const sound = [owner, repo, wanted, ...file].every(
    (part) => part !== "" && part !== "." && part !== ".." && !LONE_SURROGATE.test(part),
  );
  if (!sound || file.length === 0) {
    throw failure(
      "invalid_request",
      `"${hub}:${rest}" must read "${hub}:owner/repo/path/to/file.gguf[@revision]"`,
    );
  }
  const tail = [owner, repo, "resolve", wanted, ...file].map(encodeURIComponent).join("/");
  const key = `${hub}:${[owner, repo, ...file].join("/")}@${wanted}`;
  const hosts = mirrors?.[hub] ?? [base];
  return hosts.map((host) => ({
    url: `${withSlash(absolute(host, `the mirror "${host}"`))}${path}${tail}`,
    key,
  }));
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
