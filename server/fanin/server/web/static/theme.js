// The theme that the reader chose, before the first paint. Without a choice the system decides.
const chosen = localStorage.getItem("theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
