// Live regions, the stream, charts and the theme. Every page works without this module; it only keeps it fresh.
import { drawCharts } from "./charts.js";

const MIN_REFRESH_MS = 800;
const MIN_PAUSE_MS = 500;
const MAX_PAUSE_MS = 30000;
const link = document.getElementById("link");
const announce = document.getElementById("announce");

function showTimes(root) {
  const dateStyle = innerWidth < 640 ? "short" : "medium";
  const format = new Intl.DateTimeFormat(undefined, { dateStyle, timeStyle: "medium" });
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.title = time.textContent;
    time.textContent = format.format(new Date(time.dateTime));
  }
}

// The page is read again and its live regions are replaced: what is shown is what the coordinator would show now.
let isReading = false;
let isStale = false;
let lastRead = 0;

async function refresh() {
  if (isReading) {
    isStale = true;
    return;
  }
  isReading = true;
  try {
    do {
      isStale = false;
      await new Promise((resolve) => setTimeout(resolve, Math.max(0, lastRead + MIN_REFRESH_MS - Date.now())));
      lastRead = Date.now();
      const response = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "manual" });
      if (response.type === "opaqueredirect") return signIn();
      if (response.ok) replaceRegions(new DOMParser().parseFromString(await response.text(), "text/html"));
      document.documentElement.dataset.read = String(Date.now());
    } while (isStale);
  } catch {
    // The coordinator is away. The stream connects again, and then the page is read again.
  } finally {
    isReading = false;
  }
}

function replaceRegions(fresh) {
  let hasChanged = false;
  for (const region of document.querySelectorAll("[data-live][id]")) {
    const next = fresh.getElementById(region.id);
    if (!next || region.contains(document.activeElement) && region.querySelector("details[open]")) continue;
    showTimes(next);
    if (next.innerHTML === region.innerHTML) continue;
    const focus = region.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const scrolls = [...region.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    region.innerHTML = next.innerHTML;
    region.querySelectorAll(".scroll").forEach((each, index) => (each.scrollLeft = scrolls[index] ?? 0));
    if (focus) region.querySelector(`[aria-label="${CSS.escape(focus)}"]`)?.focus();
    hasChanged = true;
  }
  if (hasChanged) drawCharts();
}

function setLink(state, text) {
  if (link.dataset.state === state) return;
  link.dataset.state = state;
  link.textContent = text;
}

// The stream. It is connected again by this module, not by the browser: with pauses that grow, and after the last event.
let source = null;
let boot = "";
let lastId = "";
let pause = MIN_PAUSE_MS;
let waiting = 0;

function isShown(run) {
  return !location.pathname.startsWith("/runs/") || location.pathname.split("/")[2] === encodeURIComponent(run);
}

function connect() {
  disconnect();
  source = new EventSource(`/stream${lastId && `?after=${encodeURIComponent(lastId)}`}`);
  source.addEventListener("hello", (message) => {
    const now = JSON.parse(message.data).boot;
    // After a break anything may have changed.
    if (boot || link.dataset.state === "lost") refresh();
    if (boot !== now) lastId = "";
    boot = now;
    pause = MIN_PAUSE_MS;
    setLink("on", "live");
  });
  source.addEventListener("event", (message) => {
    lastId = message.lastEventId;
    const event = JSON.parse(message.data);
    if (!isShown(event.run)) return;
    announce.textContent = `${event.run}: ${event.kind}. ${event.text}`;
    refresh();
  });
  source.addEventListener("live", (message) => {
    if (document.querySelector("[data-progress], #tiles") && isShown(JSON.parse(message.data).run)) refresh();
  });
  source.addEventListener("reset", () => {
    lastId = "";
    refresh();
  });
  source.addEventListener("over", again);
  source.addEventListener("error", again);
}

function disconnect() {
  clearTimeout(waiting);
  source?.close();
  source = null;
}

// Connects again after a pause, unless the page needs a session that it does not have any more.
async function again() {
  disconnect();
  setLink("lost", "reconnecting …");
  const wait = pause * (0.5 + Math.random());
  pause = Math.min(2 * pause, MAX_PAUSE_MS);
  waiting = setTimeout(async () => {
    try {
      const answer = await fetch(location.href, { method: "HEAD" });
      if (answer.status === 401) return signIn();
    } catch {
      return again();
    }
    connect();
  }, wait);
}

function signIn() {
  disconnect();
  const anchor = Object.assign(document.createElement("a"), {
    href: `/login?next=${encodeURIComponent(location.pathname + location.search)}`,
    textContent: "sign in again",
  });
  link.dataset.state = "out";
  link.replaceChildren(anchor);
  announce.textContent = "The session has ended. Sign in again.";
}

addEventListener("pageshow", (event) => {
  if (event.persisted) connect();
});
// The back-forward cache must not hold a stream open.
addEventListener("pagehide", disconnect);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  drawCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(drawCharts, 150);
});
showTimes(document);
drawCharts();
if (!document.querySelector(".login")) connect();
