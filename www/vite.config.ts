// The page's build. The package itself needs nothing here; `format: "es"` lets each tier's glue be fetched alone.

import { defineConfig, type Plugin } from "vite";

// Threads need shared memory, which browsers give to isolated pages only.
const isolation = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
};

// Models may come from any host that the user names; scripts come from here alone.
const policy = [
  "default-src 'none'",
  "script-src 'self' 'wasm-unsafe-eval'",
  "worker-src 'self'",
  "connect-src 'self' https: http: blob: data:",
  "style-src 'self'",
  "img-src 'self' data:",
  "manifest-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");

/** The policy, first in the head. Only in the build: the development server injects styles and a socket. */
function contentSecurityPolicy(): Plugin {
  return {
    name: "content-security-policy",
    apply: "build",
    transformIndexHtml: () => [
      {
        tag: "meta",
        attrs: { "http-equiv": "Content-Security-Policy", content: policy },
        injectTo: "head-prepend",
      },
    ],
  };
}

export default defineConfig({
  base: "./",
  plugins: [contentSecurityPolicy()],
  build: { target: "esnext", assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  worker: { format: "es" },
  server: { headers: isolation, fs: { allow: [".."] } },
  preview: { headers: isolation },
});
