// Live regions, the stream, charts and the theme. Every page works without this module; it only keeps it fresh.
import { drawCharts } from "./charts.js";

const MIN_REFRESH_MS = 800;
const link = document.getElementById("link");
const announce = document.getElementById("announce");

function showTimes(root) {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
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
      const response = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "follow" });
      if (response.redirected && new URL(response.url).pathname === "/login") {
        location.href = response.url;
        return;
      }
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

let boot = "";

function connect() {
  const source = new EventSource("/stream");
  source.addEventListener("hello", (message) => {
    const now = JSON.parse(message.data).boot;
    // After a break anything may have changed.
    if (boot || link.dataset.state === "lost") refresh();
    boot = now;
    setLink("on", "live");
  });
  source.addEventListener("event", (message) => {
    const event = JSON.parse(message.data);
    const isShown = !location.pathname.startsWith("/runs/") || location.pathname.split("/")[2] === encodeURIComponent(event.run);
    if (!isShown) return;
    announce.textContent = `${event.run}: ${event.kind}. ${event.text}`;
    refresh();
  });
  source.addEventListener("live", () => {
    if (document.querySelector("[data-progress], #tiles")) refresh();
  });
  source.addEventListener("reset", refresh);
  source.addEventListener("error", () => {
    setLink("lost", "reconnecting …");
    // The browser gives up after an answer that is no stream, such as that of a coordinator which is starting.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
  // The back-forward cache must not hold a stream open.
  addEventListener("pagehide", () => source.close(), { once: true });
}

addEventListener("pageshow", (event) => {
  if (event.persisted) connect();
});
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
