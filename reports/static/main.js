"use strict";
// Theme, raw records, and the start of everything else.
Report.setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
};

Report.startTheme = () => {
  const stored = () => { try { return localStorage.getItem("locks-bench-theme"); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const wanted = () => stored() ?? (system.matches ? "dark" : "light");
  const show = (theme) => {
    Report.setTheme(theme);
    if (Report.panel) Report.drawAll();
  };
  Report.setTheme(wanted());
  system.addEventListener("change", () => show(wanted()));
  document.getElementById("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("locks-bench-theme", theme); } catch { /* a file may have no storage */ }
    show(theme);
  });
  addEventListener("beforeprint", () => Report.setTheme("light")); // paper is white
  addEventListener("afterprint", () => Report.setTheme(wanted()));
};

Report.showRecord = async (row) => {
  const dialog = document.getElementById("record");
  const shown = dialog.querySelector("pre");
  try {
    shown.textContent = JSON.stringify((await Report.records())[row], null, 1);
  } catch (error) {
    shown.textContent = error.message;
  }
  dialog.dataset.name = Report.value(row, "key");
  dialog.showModal();
};

Report.startRecord = () => {
  const dialog = document.getElementById("record");
  const text = () => dialog.querySelector("pre").textContent;
  dialog.querySelector(".copy-record").addEventListener("click", (event) => Report.copy(text(), event.target));
  dialog.querySelector(".save-record").addEventListener("click", () => Report.save(`${dialog.dataset.name}.json`, "application/json", text()));
  dialog.querySelector(".close-record").addEventListener("click", () => dialog.close());
};

Report.start = async () => {
  Report.startTheme();
  if (!document.getElementById("data")) return; // an index of runs has no rows of its own
  await Report.load();
  Report.address.start();
  Report.table.start();
  Report.startRecord();
  Report.startFigures();
  Report.address.listeners.push(Report.table.show, Report.choosePanel);
  if (Report.address.section) Report.address.goTo(Report.address.section);
  await Report.choosePanel();
  // Figures above it have grown meanwhile.
  if (Report.address.section) Report.address.goTo(Report.address.section);
};

Report.start();
