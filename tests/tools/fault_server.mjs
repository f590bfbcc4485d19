// A server of one model file that fails as told: `serve`'s answers with a fault in front of them. Counts what it sends.
//   const faulty = await faultServer({ file, site, plan: { cutAfter: 5e6 } });  faulty.plan = {…};  faulty.sent
import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { createGzip } from "node:zlib";

const range = /^bytes=(\d+)-(\d*)$/;

/**
 * Faults of a plan, each on every answer unless `times` says how often:
 * - `status`, `body`, `type`: this answer instead of the file
 * - `noRanges`: the whole file whatever was asked for; `noLength`: without Content-Length; `gzip`: encoded
 * - `cutAfter`: the connection breaks after so many bytes of an answer; `total`: after so many of all answers
 * - `stallAfter`: nothing more after so many bytes; `slow`: so many ms between 64 KiB
 * - `short`: as many bytes are missing at the end of an answer whose length says they are there; `long`: as many more
 *   come than were asked for; `shrunk`: ranges from there on are answered by 416
 * - `claim`: the file's length as `Content-Range` tells it; `mute`: no answer ever begins
 * - `atOnce`: requests beyond so many at a time are answered by 503, and counted in `refused`
 * - `zeros`: so many bytes at the end of the file are zero
 * - `linked`: the file's SHA-256, as a hub tells it
 * - `etag`: another one; `noCors`: no CORS headers; `hidden`: CORS, but nothing exposed
 */
export async function faultServer({ file, plan = {} }) {
  const { size } = await stat(file);
  const self = { plan, sent: 0, answers: 0, refused: 0, ranges: [], size };
  let open = 0;
  const answer = async (request, response) => {
    const at = self.answers++;
    const faults = self.plan.times === undefined || at < self.plan.times ? self.plan : {};
    const headers = { "Cache-Control": "no-store" };
    if (!faults.noCors) {
      headers["Access-Control-Allow-Origin"] = "*";
      headers["Cross-Origin-Resource-Policy"] = "cross-origin";
      if (!faults.hidden) headers["Access-Control-Expose-Headers"] = "Content-Range, ETag, X-Linked-Etag, Content-Encoding";
    }
    if (faults.mute) return;
    open++;
    response.on("close", () => open--);
    if (open > (faults.atOnce ?? Infinity)) {
      self.refused++;
      response.writeHead(503, headers);
      return response.end();
    }
    if (faults.status !== undefined) {
      response.writeHead(faults.status, { ...headers, "Content-Type": faults.type ?? "text/plain" });
      return response.end(faults.body ?? "");
    }
    const asked = faults.noRanges || faults.gzip ? null : range.exec(request.headers.range ?? "");
    const first = asked === null ? 0 : Number(asked[1]);
    if (first >= Math.min(size, faults.shrunk ?? size)) {
      response.writeHead(416, { ...headers, "Content-Range": `bytes */${size}` });
      return response.end();
    }
    const end = asked === null || asked[2] === "" ? size - 1 : Math.min(Number(asked[2]), size - 1);
    const last = Math.min(end + (faults.long ?? 0), size - 1);
    self.ranges.push([first, last]);
    Object.assign(headers, { ETag: faults.etag ?? '"one"', "Content-Type": "application/octet-stream" });
    if (faults.linked) headers["X-Linked-Etag"] = `"${faults.linked}"`;
    if (faults.gzip) headers["Content-Encoding"] = "gzip";
    else if (!faults.noLength) headers["Content-Length"] = last - first + 1;
    if (asked !== null) headers["Content-Range"] = `bytes ${first}-${end}/${faults.claim ?? size}`;
    response.writeHead(asked === null ? 200 : 206, headers);
    const body = createReadStream(file, { start: first, end: last, highWaterMark: 64 << 10 });
    let own = 0;
    const stop = () => { body.destroy(); response.destroy(); };
    let go = () => {};
    response.on("drain", () => go());
    response.on("close", () => { body.destroy(); go(); });
    if (faults.gzip) {
      self.sent += last - first + 1;
      return body.pipe(createGzip({ level: 1 })).pipe(response);
    }
    for await (const piece of body.iterator({ destroyOnReturn: true })) {
      if (response.destroyed) return;
      let part = piece;
      const at = first + own;
      if (at + piece.length > size - (faults.zeros ?? 0)) {
        part = Buffer.from(piece);
        part.fill(0, Math.max(0, size - faults.zeros - at));
      }
      const most = Math.min((faults.cutAfter ?? last + 1 - first - (faults.short ?? 0)) - own, faults.total === undefined ? Infinity : faults.total - self.sent);
      if (part.length > most) part = part.subarray(0, Math.max(0, most));
      own += part.length;
      self.sent += part.length;
      if (part.length > 0 && !response.write(part)) await new Promise((resolve) => { go = resolve; });
      if (part.length < piece.length) {
        // What was written must leave before the connection does.
        setTimeout(stop, 50);
        return;
      }
      if (faults.stallAfter !== undefined && own >= faults.stallAfter) return;
      if (faults.slow !== undefined) await new Promise((resolve) => setTimeout(resolve, faults.slow));
    }
    response.end();
  };
  const server = createServer((request, response) => {
    answer(request, response).catch((error) => {
      // A visitor who leaves in the middle of a file is no fault.
      if (error.code !== "ERR_STREAM_PREMATURE_CLOSE") throw error;
    });
  });
  await new Promise((resolve, reject) => server.once("error", reject).listen(0, "127.0.0.1", resolve));
  self.url = `http://localhost:${server.address().port}/model.gguf`;
  self.reset = (next = {}) => Object.assign(self, { plan: next, sent: 0, answers: 0, refused: 0, ranges: [] });
  self.close = () => new Promise((resolve) => { server.close(resolve); server.closeAllConnections(); });
  return self;
}
