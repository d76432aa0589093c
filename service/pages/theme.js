// Runs before anything is painted: the theme that was chosen here, else the system's.
"use strict";
(function () {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage is refused: the system decides
    }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-pressed", String(isDark()));
    document.dispatchEvent(new CustomEvent("theme"));
  };

  const chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  root.classList.add("js");
  system.addEventListener("change", tell);
  document.addEventListener("DOMContentLoaded", () => {
    tell();
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("theme", root.dataset.theme);
      } catch {
        // for this page only, then
      }
      tell();
    });
  });
})();
