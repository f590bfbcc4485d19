// The page's build. The package itself needs nothing here; `format: "es"` lets each tier's glue be fetched alone.

import { defineConfig, type Plugin } from "vite";
import { VitePWA } from "vite-plugin-pwa";

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

/** The service worker of sw/ with the list of the page's files, and the web manifest. The page registers it itself. */
const offline = VitePWA({
  strategies: "injectManifest",
  srcDir: "sw",
  filename: "sw.ts",
  injectRegister: false,
  includeManifestIcons: false,
  injectManifest: {
    rollupFormat: "iife",
    globPatterns: ["**/*.{css,html,js,svg,wasm}"],
    // Only the engine's builds are so large, and the service worker chooses among them.
    maximumFileSizeToCacheInBytes: 16 << 20,
  },
  manifest: {
    name: "Qandle",
    short_name: "Qandle",
    description: "Language models on your own processor, inside this browser.",
    display: "standalone",
    theme_color: "#3b5bdb",
    background_color: "#f7f7f5",
    icons: [
      { src: "icon.svg", sizes: "any", type: "image/svg+xml" },
      { src: "icon-192.png", sizes: "192x192", type: "image/png" },
      { src: "icon-512.png", sizes: "512x512", type: "image/png" },
      { src: "icon-maskable-512.png", sizes: "512x512", type: "image/png", purpose: "maskable" },
    ],
  },
});

export default defineConfig({
  base: "./",
  plugins: [contentSecurityPolicy(), offline],
  build: { target: "esnext", assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  worker: { format: "es" },
  server: { headers: isolation, fs: { allow: [".."] } },
  preview: { headers: isolation },
});
