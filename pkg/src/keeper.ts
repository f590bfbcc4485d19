// A worker beside the engine's that hashes and stores what a download brings, so that the engine's own is free to pack it.
// Both block the thread that asks for them for a third of a cold load. Answers come in any order, by id.

import { messageOf } from "./errors.js";
import type { KeepReply, KeepRequest } from "./protocol.js";

/** Serves the requests of a port until `null` comes. */
export function serveKeeper(port: MessagePort, end: () => void): void {
  port.onmessage = ({ data }: MessageEvent<KeepRequest | null>) => {
    if (data === null) return end();
    // The memory goes back: finding new memory for each chunk costs as much as copying it.
    keep(data).then((reply) =>
      port.postMessage({ ...reply, bytes: data.bytes } satisfies KeepReply, [data.bytes]),
    );
  };
  port.postMessage({ id: 0, hash: "" } satisfies KeepReply);
}

async function keep({ id, bucket, url, bytes }: KeepRequest): Promise<KeepReply> {
  try {
    const hash = hex(await crypto.subtle.digest("SHA-256", bytes));
    const cache = await caches.open(bucket);
    await cache.put(url, new Response(new Blob([bytes])));
    return { id, hash };
  } catch (thrown) {
    const name = thrown instanceof Error || thrown instanceof DOMException ? thrown.name : "Error";
    return { id, error: { name, message: messageOf(thrown) } };
  }
}

function hex(digest: ArrayBuffer): string {
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
