// The page's side of its start without a network: registers the service worker, tells it what the engine used, and says
// when another version of the page is ready. Nothing here reloads a page unasked: a chat may be under way.

import type { Tier } from "qandle";
import type { ToServiceWorker } from "./offline_messages.js";

/** Missing on insecure origins and in some private windows: the page then works, but needs its server. */
const container: ServiceWorkerContainer | undefined = navigator.serviceWorker;

/** Keeps the page for later visits. `onUpdate` gets what reloads into another version, when there is one. */
export async function keepPage(onUpdate: (reload: () => void) => void): Promise<void> {
  if (container === undefined || import.meta.env.DEV) return;
  let registration: ServiceWorkerRegistration;
  try {
    registration = await container.register("./sw.js");
  } catch (error) {
    console.warn("the page will not start without a network:", error);
    return;
  }
  let asked = false;
  const reload = () => {
    asked = true;
    const { waiting } = registration;
    if (waiting === null) return location.reload();
    waiting.addEventListener("statechange", () => {
      if (waiting.state === "activated") location.reload();
    });
    say(waiting, { type: "takeOver" });
  };
  // On a first visit none is active yet: that is no update.
  const look = () => {
    if (registration.waiting !== null && registration.active !== null) onUpdate(reload);
  };
  look();
  const follow = () => registration.installing?.addEventListener("statechange", look);
  follow();
  registration.addEventListener("updatefound", follow);
  // Another tab has let the new version take over; this one still shows the old.
  container.addEventListener("controllerchange", () => {
    if (!asked) onUpdate(reload);
  });
}

/** Has the engine's builds for an instruction set kept; the best one of this browser is kept anyway. */
export async function keepBuilds(tier: Tier): Promise<void> {
  const { active } = (await container?.ready) ?? { active: null };
  if (active !== null) say(active, { type: "keep", tier });
}

function say(to: ServiceWorker, message: ToServiceWorker): void {
  to.postMessage(message);
}
