// A small static server for the page, the package and the models: Range, ETag, MIME types, COOP/COEP. By itself:
//   node serve.mjs [--port 8080] [--host 127.0.0.1] [--open-policy] [--probe] [--mount /url/=folder ...]
// (--probe only says whether the port is free)
// or `await serve({ mounts, port })` from tests and the benchmark.
import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import path from "node:path";
import { pipeline } from "node:stream/promises";
import { fileURLToPath, pathToFileURL } from "node:url";

const root = fileURLToPath(new URL("../../", import.meta.url));

const types = {
  ".css": "text/css; charset=utf-8",
  ".gguf": "application/octet-stream",
  ".html": "text/html; charset=utf-8",
  ".ico": "image/x-icon",
  ".js": "text/javascript; charset=utf-8",
  ".json": "application/json",
  ".mjs": "text/javascript; charset=utf-8",
  ".png": "image/png",
  ".svg": "image/svg+xml",
  ".ttf": "font/ttf",
  ".txt": "text/plain; charset=utf-8",
  ".wasm": "application/wasm",
  ".webmanifest": "application/manifest+json",
  ".woff2": "font/woff2",
};

const isolation = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
};

/** What `./build.sh serve` serves. */
export const defaultMounts = {
  "/": path.join(root, "www/dist"),
  "/pkg/": path.join(root, "pkg/dist"),
  "/models/": path.join(root, "models"),
};

/** The file behind a request, or null; never one outside its mount, never a hidden one. */
function locate(mounts, url) {
  let pathname;
  try {
    pathname = decodeURIComponent(new URL(url, "http://localhost").pathname);
  } catch {
    return null;
  }
  if (pathname.includes("\0") || pathname.includes("\\")) return null;
  const prefix = Object.keys(mounts)
    .filter((mount) => pathname.startsWith(mount))
    .sort((a, b) => b.length - a.length)[0];
  if (prefix === undefined) return null;
  const rest = pathname.slice(prefix.length);
  if (rest.split("/").some((part) => part.startsWith("."))) return null;
  const folder = path.resolve(mounts[prefix]);
  const file = path.join(folder, rest === "" || rest.endsWith("/") ? `${rest}index.html` : rest);
  return file.startsWith(folder + path.sep) ? file : null;
}

/** First and last byte of one range; null for the whole file, false for one that cannot be met. */
function rangeOf(header, size) {
  const match = /^bytes=(\d*)-(\d*)$/.exec(header ?? "");
  if (match === null || (match[1] === "" && match[2] === "")) return null;
  const first = match[1] === "" ? Math.max(0, size - Number(match[2])) : Number(match[1]);
  const last = match[1] === "" || match[2] === "" ? size - 1 : Math.min(Number(match[2]), size - 1);
  return first > last || first >= size ? false : { first, last };
}

async function answer(request, response, { mounts, isolated, onRequest }) {
  const headers = { ...(isolated ? isolation : {}), "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache" };
  const end = (status, text, more = {}) => {
    response.writeHead(status, { ...headers, "Content-Type": "text/plain; charset=utf-8", ...more });
    response.end(request.method === "HEAD" ? undefined : text);
  };
  if (onRequest !== undefined && (await onRequest(request, response, headers))) return;
  if (request.method !== "GET" && request.method !== "HEAD") return end(405, "only GET and HEAD\n", { Allow: "GET, HEAD" });
  const file = locate(mounts, request.url);
  const found = file === null ? null : await stat(file).catch(() => null);
  if (found === null || !found.isFile()) return end(404, "not found\n");
  const etag = `"${found.size.toString(16)}-${Math.round(found.mtimeMs).toString(16)}"`;
  Object.assign(headers, { ETag: etag, "Last-Modified": found.mtime.toUTCString(), "Accept-Ranges": "bytes" });
  headers["Content-Type"] = types[path.extname(file).toLowerCase()] ?? "application/octet-stream";
  if ((request.headers["if-none-match"] ?? "").split(/\s*,\s*/).includes(etag)) {
    response.writeHead(304, headers);
    return response.end();
  }
  const ifRange = request.headers["if-range"];
  const range = ifRange === undefined || ifRange === etag ? rangeOf(request.headers.range, found.size) : null;
  if (range === false) return end(416, "range not satisfiable\n", { "Content-Range": `bytes */${found.size}` });
  const { first, last } = range ?? { first: 0, last: found.size - 1 };
  headers["Content-Length"] = last - first + 1;
  if (range !== null) headers["Content-Range"] = `bytes ${first}-${last}/${found.size}`;
  response.writeHead(range === null ? 200 : 206, headers);
  if (request.method === "HEAD" || found.size === 0) return response.end();
  await pipeline(createReadStream(file, { start: first, end: last, highWaterMark: 1 << 20 }), response);
}

/**
 * Starts a server; port 0 takes a free one. `mounts` maps URL prefixes, each with a slash at its end, to folders;
 * `isolated: false` leaves COOP/COEP out; `onRequest(request, response, headers)` answers first when it returns true.
 */
export async function serve({ mounts = defaultMounts, port = 0, host = "127.0.0.1", isolated = true, onRequest } = {}) {
  const server = createServer((request, response) => {
    answer(request, response, { mounts, isolated, onRequest }).catch((error) => {
      // A visitor who leaves in the middle of a file is no fault of ours.
      if (error.code !== "ERR_STREAM_PREMATURE_CLOSE" && !response.destroyed) {
        console.error(`${request.method} ${request.url}: ${error.message}`);
        response.destroy();
      }
    });
  });
  await new Promise((resolve, reject) => server.once("error", reject).listen(port, host, resolve));
  const url = `http://localhost:${server.address().port}`;
  return {
    url,
    port: server.address().port,
    close: () => new Promise((resolve) => { server.close(resolve); server.closeAllConnections(); }),
  };
}

if (process.argv[1] !== undefined && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const value = (name, otherwise) => {
    const at = process.argv.indexOf(name);
    return at < 0 ? otherwise : process.argv[at + 1];
  };
  const port = Number(value("--port", 8080));
  const mounts = { ...defaultMounts };
  process.argv.forEach((word, i) => {
    if (word !== "--mount") return;
    const [prefix, folder] = process.argv[i + 1].split("=");
    mounts[prefix] = folder;
  });
  try {
    if (process.argv.includes("--probe")) {
      await (await serve({ port })).close();
      process.exit(0);
    }
    const { url } = await serve({ mounts, port, host: value("--host", "127.0.0.1"), isolated: !process.argv.includes("--open-policy") });
    console.log(`\nThe page is at ${url}/ (Ctrl-C ends it)`);
  } catch (error) {
    if (error.code !== "EADDRINUSE") throw error;
    console.error(`build.sh: port ${port} is taken; choose another: ./build.sh serve --port ${port + 1}`);
    process.exit(1);
  }
}
