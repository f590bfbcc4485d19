// Web Locks as a sign of life: a worker or thread takes a lock for ever, and who asks for it after that gets it when the
// holder is gone, however it ended.

/** A name that nobody else has. */
export function randomName(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Takes the lock and never lets go; resolves once it is held, or at once where there are no locks. */
export function holdLock(locks: Pick<LockManager, "request"> | undefined, name: string): Promise<void> {
  if (locks === undefined) return Promise.resolve();
  return new Promise((resolve) => {
    const held = locks.request(name, () => {
      resolve();
      return new Promise<never>(() => {});
    });
    // Refused to opaque origins and where storage is blocked: the page then learns of a death from events alone.
    held.catch(() => resolve());
  });
}

/** Calls `onGone` when the holder is gone. Without Web Locks (insecure pages) only events tell of a death. */
export function watchLock(
  locks: Pick<LockManager, "request"> | undefined,
  name: string,
  { signal, onGone }: { signal: AbortSignal; onGone(): void },
): void {
  locks?.request(name, { signal }, onGone).catch((thrown: unknown) => {
    // Aborted on release; refused to opaque origins and where storage is blocked. Neither is a death.
    const name = thrown instanceof DOMException ? thrown.name : "";
    if (name !== "AbortError" && name !== "SecurityError" && name !== "InvalidStateError") throw thrown;
  });
}
