"use strict";
// What the page shows is in its address, as #section?name=value&..., so that a link opens the same view.
Report.address = { section: "", values: new URLSearchParams(), listeners: [] };

Report.address.read = () => {
  const [section, query = ""] = location.hash.slice(1).split("?");
  Report.address.section = decodeURIComponent(section);
  Report.address.values = new URLSearchParams(query);
};

Report.address.get = (name) => Report.address.values.get(name) ?? "";

Report.address.text = (section) => {
  const query = Report.address.values.toString();
  return `#${section}${query ? `?${query}` : ""}`;
};

// Set values ("" removes one) without a new entry in the history of the browser.
Report.address.set = (changes, section = Report.address.section) => {
  const { address } = Report;
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null) address.values.delete(name);
    else address.values.set(name, value);
  }
  address.section = section;
  history.replaceState(null, "", address.text(section || "summary"));
};

Report.address.goTo = (section) => {
  const target = document.getElementById(section);
  if (!target) return;
  target.scrollIntoView();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.section === section) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
};

Report.address.start = () => {
  const { address } = Report;
  address.read();
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-section]");
    if (!link) return;
    event.preventDefault(); // the plain link would lose what is shown
    address.set({}, link.dataset.section);
    address.goTo(link.dataset.section);
  });
  addEventListener("hashchange", () => {
    address.read();
    for (const listener of address.listeners) listener();
    address.goTo(address.section);
  });
};
