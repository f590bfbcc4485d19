// A worker beside the engine's that hashes and stores what a download brings, and reads what is stored, so that the
// engine's own is free to pack it: all of that blocks the thread that asks for it. Answers come in any order, by id.

import { messageOf } from "./errors.js";
import type { ChunkPlace, KeepReply, KeepRequest } from "./protocol.js";

/** Bytes that are written to a file at a time: Chromium takes eight times as long for the same bytes by 8 MiB. */
const PIECE = 1 << 20;
/** A file that another tab or worker has open is tried again so often, and so much later. */
const TRIES = 50;
const WAIT_MS = 100;

/** `FileSystemSyncAccessHandle`, as far as it is used here: TypeScript has it for workers only. */
interface SyncFile {
  read(into: Uint8Array, options: { at: number }): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  close(): void;
}
interface FileEntry {
  createSyncAccessHandle(): Promise<SyncFile>;
}

/** Serves the requests of a port until `null` comes. */
export function serveKeeper(port: MessagePort, end: () => void): void {
  const keeper = new Keeper();
  port.onmessage = ({ data }: MessageEvent<KeepRequest | null>) => {
    if (data === null) return end();
    // The memory goes back: finding new memory for each chunk costs as much as copying it.
    keeper.serve(data).then((reply) => port.postMessage(reply, reply.bytes ? [reply.bytes] : []));
  };
  port.postMessage({ id: 0 } satisfies KeepReply);
}

class Keeper {
  readonly #databases = new Map<string, Promise<IDBDatabase>>();
  readonly #files = new Map<string, Promise<SyncFile>>();

  async serve({ id, place, bytes }: KeepRequest): Promise<KeepReply> {
    try {
      if (place === undefined) {
        await this.#closeFiles();
        return { id };
      }
      if (bytes === undefined) return { id, bytes: await this.#read(place) };
      const hash = hex(await crypto.subtle.digest("SHA-256", bytes));
      await this.#store(place, bytes);
      return { id, hash, bytes };
    } catch (thrown) {
      const name = thrown instanceof Error || thrown instanceof DOMException ? thrown.name : "Error";
      return { id, error: { name, message: messageOf(thrown) }, bytes };
    }
  }

  async #store(place: ChunkPlace, bytes: ArrayBuffer): Promise<void> {
    if ("folder" in place) {
      const file = await this.#file(place.folder, place.file);
      for (let from = 0; from < bytes.byteLength; from += PIECE) {
        const piece = new Uint8Array(bytes, from, Math.min(PIECE, bytes.byteLength - from));
        if (file.write(piece, { at: place.at + from }) !== piece.length)
          throw new DOMException("not all bytes were written", "QuotaExceededError");
      }
    } else if ("bucket" in place) {
      const cache = await caches.open(place.bucket);
      await cache.put(place.url, new Response(new Blob([bytes])));
    } else {
      const transaction = (await this.#database(place.database)).transaction(place.table, "readwrite");
      transaction.objectStore(place.table).put(new Blob([bytes]), place.key);
      await new Promise<void>((resolve, reject) => {
        transaction.oncomplete = () => resolve();
        transaction.onabort = () => reject(transaction.error ?? new Error("the transaction was aborted"));
      });
    }
  }

  async #read(place: ChunkPlace): Promise<ArrayBuffer | undefined> {
    if ("folder" in place) {
      const file = await this.#file(place.folder, place.file);
      const bytes = new ArrayBuffer(place.length);
      return file.read(new Uint8Array(bytes), { at: place.at }) === place.length ? bytes : undefined;
    }
    if ("bucket" in place) {
      const response = await (await caches.open(place.bucket)).match(place.url);
      return response?.arrayBuffer();
    }
    const transaction = (await this.#database(place.database)).transaction(place.table);
    const value = await result(transaction.objectStore(place.table).get(place.key));
    return value instanceof Blob ? value.arrayBuffer() : undefined;
  }

  #database(name: string): Promise<IDBDatabase> {
    return once(this.#databases, name, async () => {
      const database = await result(indexedDB.open(name));
      // Another tab with a newer version must not wait for this one.
      database.onversionchange = () => database.close();
      return database;
    });
  }

  #file(folder: string, name: string): Promise<SyncFile> {
    return once(this.#files, `${folder}/${name}`, () => openFile(folder, name));
  }

  async #closeFiles(): Promise<void> {
    const files = [...this.#files.values()];
    this.#files.clear();
    for (const file of await Promise.allSettled(files)) {
      if (file.status === "fulfilled") file.value.close();
    }
  }
}

/** What is under a key, made where it is not there; what could not be made is tried again. */
function once<T>(all: Map<string, Promise<T>>, key: string, make: () => Promise<T>): Promise<T> {
  const there = all.get(key);
  if (there !== undefined) return there;
  const made = make();
  all.set(key, made);
  made.catch(() => all.delete(key));
  return made;
}

async function openFile(folder: string, name: string): Promise<SyncFile> {
  const root = await navigator.storage.getDirectory();
  const directory = await root.getDirectoryHandle(folder, { create: true });
  const entry = (await directory.getFileHandle(name, { create: true })) as unknown as FileEntry;
  for (let tries = 1; ; tries++) {
    try {
      return await entry.createSyncAccessHandle();
    } catch (thrown) {
      const open = thrown instanceof DOMException && thrown.name === "NoModificationAllowedError";
      if (!open || tries === TRIES) throw thrown;
      await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
    }
  }
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the request failed"));
  });
}

function hex(digest: ArrayBuffer): string {
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
