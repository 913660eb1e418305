// Every two seconds, while somebody looks, the parts of the page marked data-live are brought up to date.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 8000;
const freshness = document.getElementById("freshness");

async function refresh() {
  let answer, fresh;
  try {
    answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    say("Posthouse does not answer", true);
    return;
  }
  if (!answer.ok) {
    say(fresh.getElementById("fault")?.textContent ?? answer.statusText, true);
  } else if (!document.querySelector("[data-live]")) {
    location.reload(); // this was a page about a fault, and the fault is gone
  } else if (getSelection().isCollapsed) {
    document.querySelectorAll("[data-live]").forEach((part) => renew(part, fresh.getElementById(part.id)));
    say("Live", false);
  }
}

// What did not change stays as it is: a focus, an opened traceback and a screen reader's place are kept.
function renew(part, fresh) {
  if (!fresh || part.innerHTML === fresh.innerHTML) return;
  const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const opened = [...part.querySelectorAll("details[open]")].map((details) => details.id);
  part.replaceChildren(...fresh.childNodes);
  opened.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
  if (focused) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function say(words, isStale) {
  freshness.textContent = words;
  freshness.className = isStale ? "stale" : "live";
}

async function watch() {
  if (!document.hidden) await refresh();
  setTimeout(watch, EVERY_MS);
}

document.addEventListener("visibilitychange", () => (document.hidden ? say("Paused", false) : refresh()));
setTimeout(watch, EVERY_MS);
say("Live", false);
