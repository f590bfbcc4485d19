// Browsers for the end-to-end tests and the benchmark: a server on a free port, a fresh profile for each browser, and
// pages that know nothing of the driver. Owns the processes that it starts and ends them by their own handles.
import { execFileSync } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import puppeteer from "puppeteer-core";
import { serve } from "../tools/serve.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));

/** The four builds, as `load` takes them. */
export const tiers = [
  { tier: "simd128", threads: 1 },
  { tier: "relaxed", threads: 1 },
  { tier: "simd128", threads: 2 },
  { tier: "relaxed", threads: 2 },
];

/** `QANDLE_FULL=1` (`./build.sh test --full`) runs what is too long for every day. */
export const full = process.env.QANDLE_FULL === "1";

/** Browsers that tests may ask for; Firefox runs few tests unless `full`. */
export const browsers = ["chromium", "firefox"];

/** The default model's URL path on both sites. */
export const model05 = "/models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf";

const chromiumFlags = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--no-first-run",
];

const firefoxPrefs = {
  "app.normandy.enabled": false,
  "app.update.enabled": false,
  "browser.aboutwelcome.enabled": false,
  "browser.safebrowsing.malware.enabled": false,
  "browser.safebrowsing.phishing.enabled": false,
  "datareporting.policy.dataSubmissionEnabled": false,
  "extensions.systemAddon.update.enabled": false,
  "network.captive-portal-service.enabled": false,
  "network.connectivity-service.enabled": false,
  "privacy.reduceTimerPrecision": false,
  "toolkit.telemetry.enabled": false,
};

/** The first of these commands that is installed. */
function executable(variable, names) {
  if (process.env[variable]) return process.env[variable];
  for (const name of names) {
    try {
      return execFileSync("sh", ["-c", `command -v ${name}`], { encoding: "utf8" }).trim();
    } catch {
      continue;
    }
  }
  throw new Error(`none of ${names.join(", ")} is installed; ./build.sh test installs one, or set ${variable}`);
}

/**
 * Serves the package for tests that import it themselves: `/` is an empty page, `/pkg/` the package, `/models/` and
 * `/fixtures/` the files. Options go to `serve`.
 */
export function packageSite({ mounts = {}, ...options } = {}) {
  return serve({
    mounts: {
      "/": path.join(root, "tests/browser/site"),
      "/pkg/": path.join(root, "pkg/dist"),
      "/models/": path.join(root, "models"),
      "/fixtures/": path.join(root, "tests/fixtures"),
      ...mounts,
    },
    ...options,
  });
}

/** Serves the built chat page as `./build.sh serve` does. */
export function pageSite(options = {}) {
  return serve(options);
}

/** A browser with its own profile, and without a driver's limits on time. `close` ends it and removes the profile. */
export async function openBrowser(name = "chromium", { args = [], prefs = {}, profile } = {}) {
  const userDataDir = profile ?? (await mkdtemp(path.join(os.tmpdir(), `qandle-${name}-`)));
  const common = { headless: true, userDataDir, protocolTimeout: 1_800_000, timeout: 120_000, handleSIGINT: true, handleSIGTERM: true };
  const browser =
    name === "firefox"
      ? await puppeteer.launch({ ...common, browser: "firefox", executablePath: executable("FIREFOX", ["firefox-esr", "firefox"]), args, extraPrefsFirefox: { ...firefoxPrefs, ...prefs } })
      : await puppeteer.launch({ ...common, executablePath: executable("CHROMIUM", ["chromium", "chromium-browser", "google-chrome"]), args: [...chromiumFlags, ...args] });
  return {
    name,
    browser,
    profile: userDataDir,
    version: await browser.version(),
    pid: browser.process()?.pid ?? null,
    /** A page at a URL; what it logs as an error is kept in `page.faults`. */
    async open(url) {
      const page = await browser.newPage();
      page.faults = [];
      page.on("pageerror", (error) => page.faults.push(String(error)));
      page.on("console", (message) => message.type() === "error" && page.faults.push(message.text()));
      await page.goto(url);
      return page;
    },
    async close() {
      const child = browser.process();
      await Promise.race([browser.close(), new Promise((resolve) => setTimeout(resolve, 10_000))]).catch(() => {});
      if (child !== null && child.exitCode === null) child.kill("SIGKILL");
      if (profile === undefined) await rm(userDataDir, { recursive: true, force: true, maxRetries: 5 });
    },
  };
}

/**
 * Opens the empty page of a package site with the package imported as `window.qandle`. `page.run(f, argument)` runs an
 * async function there and hands back what it returns; an error keeps its `code`.
 */
export async function packagePage(browser, site) {
  const page = await browser.open(`${site.url}/`);
  await page.evaluate(async () => {
    window.qandle = await import("/pkg/index.js");
    window.engines = {};
    /** Numbers as a base64 string of float32, as a driver is slow with long arrays. */
    window.pack = (floats) => {
      const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
      let text = "";
      for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
      return btoa(text);
    };
    window.sha256 = async (view) => {
      const copy = new Uint8Array(view.byteLength);
      copy.set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength));
      return Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", copy)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    };
  });
  page.run = async (action, argument) => {
    const reply = await page.evaluate(
      async (source, value) => {
        try {
          return { value: await new Function(`return (${source})`)()(value) };
        } catch (error) {
          return { error: { name: error?.name ?? "Error", message: String(error?.message ?? error), code: error?.code, stack: error?.stack } };
        }
      },
      action.toString(),
      argument,
    );
    if (reply.error === undefined) return reply.value;
    const error = new Error(`in the page: ${reply.error.name}: ${reply.error.message}`);
    throw Object.assign(error, { code: reply.error.code, pageName: reply.error.name, pageStack: reply.error.stack });
  };
  return page;
}

/** Float32 numbers out of `window.pack`. */
export function unpack(text) {
  const bytes = Buffer.from(text, "base64");
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
}
