// What the rest of the machine does while something is timed: CPU use of other processes, from /proc. A sample is
// disturbed when others used more than FOREIGN_CORES meanwhile, and is then taken once more, as far as tries go.
import { readdirSync, readFileSync } from "node:fs";

const FOREIGN_CORES = 0.25;
const TICKS = 100;

function busySeconds() {
  const [user, nice, system, , , irq, softirq] = readFileSync("/proc/stat", "utf8").split("\n")[0].trim().split(/\s+/).slice(1).map(Number);
  return (user + nice + system + irq + softirq) / TICKS;
}

/** Processes of a tree with their CPU seconds; ended children are in their parent's. */
export function processTree(root = process.pid) {
  const children = new Map();
  const seconds = new Map();
  for (const name of readdirSync("/proc")) {
    if (!/^\d+$/.test(name)) continue;
    let line;
    try {
      line = readFileSync(`/proc/${name}/stat`, "utf8");
    } catch {
      continue; // It ended while the folder was read.
    }
    const fields = line.slice(line.lastIndexOf(")") + 2).split(" ");
    const parent = Number(fields[1]);
    seconds.set(Number(name), fields.slice(11, 15).reduce((sum, ticks) => sum + Number(ticks), 0) / TICKS);
    children.set(parent, [...(children.get(parent) ?? []), Number(name)]);
  }
  const pids = [root];
  for (const pid of pids) pids.push(...(children.get(pid) ?? []));
  return { pids, seconds: pids.reduce((sum, pid) => sum + (seconds.get(pid) ?? 0), 0) };
}

/** 1-minute load average, our own threads included. */
export const load1 = () => Number(readFileSync("/proc/loadavg", "utf8").split(" ")[0]);

function start() {
  return { at: performance.now(), busy: busySeconds(), own: processTree().seconds };
}

/** Cores that other processes used since `start`. */
function foreignSince(begun) {
  const wall = (performance.now() - begun.at) / 1000;
  return Math.max(0, (busySeconds() - begun.busy - (processTree().seconds - begun.own)) / wall);
}

async function quiet(seconds) {
  const until = performance.now() + 1000 * seconds;
  do {
    const begun = start();
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (foreignSince(begun) <= FOREIGN_CORES) return;
  } while (performance.now() < until);
}

/** Runs `action` up to `tries` times until a run is undisturbed; the least disturbed one with its `foreign` cores. */
export async function sample(action, { tries, quietSeconds }) {
  let best = null;
  for (let i = 0; i < tries && (best === null || best.foreign > FOREIGN_CORES); i++) {
    await quiet(quietSeconds);
    const begun = start();
    const value = await action(i);
    const foreign = foreignSince(begun);
    if (best === null || foreign < best.foreign) best = { value, foreign, clean: foreign <= FOREIGN_CORES };
  }
  return best;
}

/** Resident bytes of a browser's renderers, or of one process. */
export function residentBytes(pid, onlyRenderers) {
  let bytes = 0;
  for (const each of processTree(pid).pids) {
    try {
      if (onlyRenderers && !/--type=renderer|-contentproc/.test(readFileSync(`/proc/${each}/cmdline`, "utf8"))) continue;
      bytes += 1024 * Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${each}/status`, "utf8"))?.[1] ?? 0);
    } catch {
      continue; // It ended meanwhile.
    }
  }
  return bytes;
}

/** The value below which the share `q` of all values lies, between two neighbours in proportion. */
export function quantile(values, q) {
  const sorted = values.filter((value) => Number.isFinite(value)).sort((a, b) => a - b);
  if (sorted.length === 0) return null;
  const at = q * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
  return low + (high - low) * (at - Math.floor(at));
}

export const median = (values) => quantile(values, 0.5);
