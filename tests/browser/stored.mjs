// What a page's origin has stored, looked at, used, and damaged behind the store's back. The functions run in the page.

/** Loads in the page and says what came of it; the engine is closed again. */
export const attempt = async ({ url, options = {}, ask = true }) => {
  const seen = { notices: [], sources: new Set(), fractions: [] };
  const begun = performance.now();
  try {
    const engine = await window.qandle.load(url, {
      threads: 1,
      ...options,
      onNotice: (notice) => seen.notices.push(notice.code),
      onProgress: ({ source, fraction }) => { seen.sources.add(source); seen.fractions.push(fraction); },
    });
    const ms = performance.now() - begun;
    const reply = ask ? await engine.completions.create({ prompt: [1, 2, 3], max_tokens: 4, temperature: 0, return_tokens: true }) : null;
    await engine.close();
    const rising = seen.fractions.every((fraction, i) => i === 0 || fraction >= seen.fractions[i - 1]);
    return { code: "ok", ids: reply && Array.from(reply.choices[0].token_ids), ms, notices: seen.notices, sources: [...seen.sources], rising };
  } catch (error) {
    return { code: error.code ?? error.name, message: error.message, ms: performance.now() - begun, notices: seen.notices };
  }
};

/** The rows of `models.list`, less what differs from run to run. */
export const listed = async () => (await window.qandle.models.list()).map(({ source, bytes, storedBytes, complete }) => ({ source, bytes, storedBytes, complete }));

/** Names of all stored chunks, or of the files that hold them, by place. */
export const storedNames = async () => {
  const files = async (folder) => {
    const names = [];
    try {
      const handle = await (await navigator.storage.getDirectory()).getDirectoryHandle(folder);
      for await (const name of handle.keys()) names.push(name);
    } catch {}
    return names;
  };
  const rows = async () => {
    if (!(await indexedDB.databases()).some(({ name }) => name === "qandle")) return [];
    const opened = await new Promise((resolve, reject) => {
      const request = indexedDB.open("qandle");
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
    const request = opened.transaction("chunks").objectStore("chunks").getAllKeys();
    const keys = await new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
    opened.close();
    return keys;
  };
  const cached = async () => ("caches" in self ? (await (await caches.open("qandle-weights-v1")).keys()).map(({ url }) => url) : []);
  const chunks = { file: await files("qandle-weights"), indexeddb: await rows(), cache: await cached() };
  for (const [place, names] of Object.entries(chunks)) chunks[place] = names.filter((name) => !name.includes("probe-"));
  return { ...chunks, images: await files("qandle-images") };
};

/** Changes four kilobytes of a stored chunk, wherever it lies; `cut`: leaves only five bytes of it. */
export const damageChunk = async ({ chunk = 0, at = 1000, cut = false } = {}) => {
  const spoil = (bytes) => {
    if (cut) return new Uint8Array(5);
    for (let i = 0; i < 4096; i++) bytes[at + i] ^= 0x55;
    return bytes;
  };
  let found = 0;
  try {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("qandle-weights");
    for await (const entry of folder.values()) {
      if (entry.name.startsWith("probe-")) continue;
      const [start, whole] = [chunk * (8 << 20), await entry.getFile()];
      const file = await entry.createWritable({ keepExistingData: true });
      if (cut) await file.truncate(start + 5);
      else {
        const bytes = new Uint8Array(await whole.slice(start + at, start + at + 4096).arrayBuffer());
        await file.write({ type: "write", position: start + at, data: bytes.map((byte) => byte ^ 0x55) });
      }
      await file.close();
      found++;
    }
  } catch (error) {
    if (error.name !== "NotFoundError") throw error;
  }
  const cache = await caches.open("qandle-weights-v1");
  for (const key of await cache.keys()) {
    if (!key.url.endsWith(`/${chunk}`) || key.url.includes("probe-")) continue;
    await cache.put(key, new Response(spoil(new Uint8Array(await (await cache.match(key)).arrayBuffer()))));
    found++;
  }
  const opened = await new Promise((resolve) => {
    const request = indexedDB.open("qandle");
    request.onsuccess = () => resolve(request.result);
  });
  const settled = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const store = (mode) => opened.transaction("chunks", mode).objectStore("chunks");
  for (const key of await settled(store("readonly").getAllKeys())) {
    if (!key.endsWith(`/${chunk}`) || key.startsWith("probe-")) continue;
    const blob = await settled(store("readonly").get(key));
    const bytes = spoil(new Uint8Array(await blob.arrayBuffer()));
    await settled(store("readwrite").put(new Blob([bytes]), key));
    found++;
  }
  opened.close();
  return found;
};
