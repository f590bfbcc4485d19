// Bytes of weights that a decoded token reads, from a GGUF file's tensor table: all tensors, but of the embedding one
// row where the output head is a tensor of its own.
import { open } from "node:fs/promises";

const WIDTHS = { 0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8 };
const STRING = 8;
const ARRAY = 9;
const HEADER_BYTES = 16 << 20;

export async function weightBytes(file) {
  const handle = await open(file);
  const { size } = await handle.stat();
  const { buffer } = await handle.read(Buffer.alloc(Math.min(HEADER_BYTES, size)), 0, Math.min(HEADER_BYTES, size), 0).finally(() => handle.close());
  let at = 8;
  const u32 = () => buffer.readUInt32LE((at += 4) - 4);
  const u64 = () => Number(buffer.readBigUInt64LE((at += 8) - 8));
  const string = () => {
    const bytes = u64();
    at += bytes;
    return buffer.toString("utf8", at - bytes, at);
  };
  let alignment = 32;
  const skip = (type) => {
    if (type === STRING) string();
    else if (type === ARRAY) {
      const element = u32();
      const length = u64();
      if (element === STRING || element === ARRAY) for (let i = 0; i < length; i++) skip(element);
      else at += WIDTHS[element] * length;
    } else at += WIDTHS[type];
  };
  const tensors = u64();
  const keys = u64();
  for (let i = 0; i < keys; i++) {
    const key = string();
    const type = u32();
    if (key === "general.alignment") alignment = buffer.readUInt32LE(at);
    skip(type);
  }
  const table = Array.from({ length: tensors }, () => {
    const name = string();
    const shape = Array.from({ length: u32() }, u64);
    u32();
    return { name, rows: shape[1] ?? 1, offset: u64() };
  }).sort((a, b) => a.offset - b.offset);
  const dataBytes = size - Math.ceil(at / alignment) * alignment;
  let total = 0;
  let perToken = 0;
  const untied = table.some(({ name }) => name === "output.weight");
  for (const [i, { name, rows, offset }] of table.entries()) {
    const bytes = (table[i + 1]?.offset ?? dataBytes) - offset;
    total += bytes;
    perToken += untied && name === "token_embd.weight" ? bytes / rows : bytes;
  }
  return { total, perToken };
}
