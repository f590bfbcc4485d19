// The channel on which a dying thread speaks to the page. Apart from spawn.ts, as pool threads open it too.

/** The channel of this name; undefined where browsers refuse it: without storage (Firefox), in opaque origins. */
export function openDeathChannel(name: string): BroadcastChannel | undefined {
  if (typeof BroadcastChannel !== "function") return undefined;
  try {
    return new BroadcastChannel(name);
  } catch (thrown) {
    if (thrown instanceof DOMException && thrown.name === "SecurityError") return undefined;
    throw thrown;
  }
}
