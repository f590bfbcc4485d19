// Draws the page's PNG icons from www/public/icon.svg in Chromium. By hand, when the icon has changed:
//   node tests/tools/icons.mjs
import { readFile, writeFile } from "node:fs/promises";
import { openBrowser } from "../browser/harness.mjs";

const folder = new URL("../../www/public/", import.meta.url);
const round = await readFile(new URL("icon.svg", folder), "utf8");
// Systems that cut an icon to their own shape need colour up to the edge; the drawing is within the inner 80 %.
const square = round.replace(' rx="8"', "");
if (square === round) throw new Error("icon.svg has no rounded background to be made square");

const icons = [
  ["icon-192.png", 192, round],
  ["icon-512.png", 512, round],
  ["icon-maskable-512.png", 512, square],
  ["apple-touch-icon.png", 180, square],
];

const browser = await openBrowser("chromium");
try {
  const page = await browser.open("about:blank");
  for (const [name, size, svg] of icons) {
    await page.setViewport({ width: size, height: size });
    await page.setContent(`<style>html, body { margin: 0; background: none } svg { display: block; width: ${size}px }</style>${svg}`);
    const png = await page.screenshot({ omitBackground: true });
    await writeFile(new URL(name, folder), png);
    console.log(`${name}: ${png.length} bytes`);
  }
} finally {
  await browser.close();
}
