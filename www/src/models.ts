// The models that the page offers, with what a download costs, and from where each is loaded: from this page's own
// server if that has the file, else from where an earlier visit took it, else from a hub. Nothing of a model is fetched here,
// but for asking whether it is there.

import { models } from "qandle";
import { Refusal } from "./explain.js";

/** How long a server may take to say whether it has a file, ms. One that is out of reach may never answer. */
const ANSWER_MS = 5000;

/** One line of the chooser. */
export interface Offer {
  id: string;
  name: string;
  about: string;
  /** The file on this page's server, and its key for `./build.sh model`; null where the user names the source. */
  local: { path: string; key: string } | null;
  /** What `load` takes where this server does not have the file; null: no other place. */
  hub: string | null;
  /** Bytes of the download; null where unknown. */
  bytes: number | null;
}

export const OFFERS: readonly Offer[] = [
  {
    id: "coder-0.5b",
    name: "Qwen2.5-Coder 0.5B",
    about: "Small and quick",
    local: { path: "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", key: "0.5b" },
    hub: null,
    bytes: 491_400_064,
  },
  {
    id: "coder-1.5b",
    name: "Qwen2.5-Coder 1.5B",
    about: "Better answers, slower",
    local: { path: "models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", key: "1.5b" },
    hub: null,
    bytes: 1_117_320_768,
  },
  {
    id: "r1-1.5b",
    name: "DeepSeek-R1-Distill-Qwen 1.5B",
    about: "Thinks before it answers; from this server or Hugging Face, about 1.1 GB",
    local: { path: "models/deepseek-r1-distill-qwen-1.5b-q4_k_m.gguf", key: "r1" },
    hub: "hf:unsloth/DeepSeek-R1-Distill-Qwen-1.5B-GGUF/DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf",
    bytes: null,
  },
  {
    id: "custom",
    name: "Another address",
    about: "A GGUF file on the web",
    local: null,
    hub: null,
    bytes: null,
  },
  { id: "file", name: "A file", about: "A GGUF file on this device", local: null, hub: null, bytes: null },
];

/** The offer that a kept source belongs to: one of the list, or an address of the user's own. */
export function offerOf(source: string | undefined): string {
  if (source === undefined) return "coder-0.5b";
  return OFFERS.find(({ hub, local }) => source === hub || source === local?.path)?.id ?? "custom";
}

/** Where an offer is loaded from now. Throws a `Refusal` when its file is nowhere, an `AbortError` under the signal. */
export async function locate({ name, local, hub }: Offer, signal: AbortSignal): Promise<string> {
  if (local === null) throw new Error(`"${name}" has no source of its own`);
  const found = await isServed(local.path, signal);
  if (found === true || (found === null && hub === null)) return local.path;
  // What is kept on this device needs no server.
  if (await isKept(local.path)) return local.path;
  if (hub !== null) return hub;
  throw new Refusal(
    `This server does not have the file of ${name} (${local.path}).`,
    `Where the server runs, ./build.sh model ${local.key} fetches it. Then load again, or choose another model.`,
  );
}

/** Whether this server has a file; null when it does not tell, so that only loading will show. */
async function isServed(path: string, signal: AbortSignal): Promise<boolean | null> {
  let reply: Response;
  try {
    const limited = AbortSignal.any([signal, AbortSignal.timeout(ANSWER_MS)]);
    reply = await fetch(path, { method: "HEAD", cache: "no-cache", signal: limited });
  } catch (error) {
    if (signal.aborted) throw error;
    return null;
  }
  // A server that answers every unknown path with its index page does not have the file either.
  const isPage = (reply.headers.get("content-type") ?? "").startsWith("text/html");
  if (reply.status === 404 || reply.status === 410 || (reply.ok && isPage)) return false;
  return reply.ok ? true : null;
}

/** Whether all of a model is kept in this browser; false where the engine cannot be asked. */
async function isKept(source: string): Promise<boolean> {
  try {
    return await models.has(source);
  } catch (error) {
    console.warn("the store could not be asked:", error);
    return false;
  }
}

/** The address if it can be one: a URL, a path on this server, a hub's form or a relative *.gguf; else throws a `Refusal`. */
export function checkAddress(address: string): string {
  const isUrl = /^(https?|blob|data):/i.test(address) && URL.canParse(address);
  const isPath = address.startsWith("/") || /^[^:?#]+\.gguf([?#]|$)/i.test(address);
  if (isUrl || isPath || /^(hf|ms):/.test(address)) return address;
  throw new Refusal(
    `“${address}” is not the address of a model.`,
    "Write a URL that begins with https://, a path on this server such as /models/name.gguf, or hf:owner/repo/file.gguf.",
  );
}
