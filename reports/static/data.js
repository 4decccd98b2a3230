"use strict";
// The table of all rows by column, its numbers as text (as reports/text.py writes them), and the raw records on demand.
const Report = {};

Report.load = async () => {
  const source = document.getElementById("data");
  const data = source.type === "application/json" ? JSON.parse(source.textContent) : await Report.unpack(source);
  const columns = {};
  for (const [name, column] of Object.entries(data.columns)) {
    columns[name] = Array.isArray(column) ? column : column.codes.map((code) => column.values[code]);
  }
  Object.assign(Report, { columns, count: data.count, styles: data.styles, panels: data.panels, fidelityRows: data.fidelity });
  for (const panel of Report.panels) Object.assign(panel.figures, data.shared); // figures that do not depend on the set-up
};

// Value of a row's column; -1 is a place without a row that may be drawn.
Report.value = (row, name) => (row < 0 ? null : Report.columns[name][row]);

Report.size = (tokens) => {
  for (const [suffix, factor] of [["M", 1048576], ["K", 1024]]) {
    if (tokens % factor === 0) return `${tokens / factor}${suffix}`;
  }
  return String(tokens);
};

Report.number = (value) => {
  if (value === null || value === undefined) return "-";
  if (value > 0 && value < 0.005) return "<0.01";
  const size = Math.abs(value);
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};

Report.bracket = (bounds) => (bounds ? `[${bounds.map(Report.number).join(", ")}]` : "");

Report.cell = (row) => `${Report.size(Report.value(row, "ctx"))} x ${Report.value(row, "batch")}`;

// Raw records, unpacked once and only when somebody asks.
Report.records = () => {
  Report.unpacked ??= Report.unpack(document.getElementById("raw"));
  return Report.unpacked;
};

Report.unpack = async (source) => {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack the records");
  const packed = Uint8Array.from(atob(source.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

Report.element = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// A plain table; the first column names its rows, numbers are set to the right.
Report.plainTable = (head, body, caption) => {
  const make = Report.element;
  const numeric = head.map((_, column) => column > 0 && body.some((line) => typeof line[column] === "number"));
  const kind = (column) => (numeric[column] ? "number" : "");
  const text = (value) => (typeof value === "number" ? Report.number(value) : value === null ? "-" : String(value));
  const cell = (value, column) =>
    column === 0 ? make("th", { scope: "row" }, text(value)) : make("td", { className: kind(column) }, text(value));
  return make(
    "table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...head.map((label, column) => make("th", { scope: "col", className: kind(column) }, label)))),
    make("tbody", {}, ...body.map((line) => make("tr", {}, ...line.map(cell)))),
  );
};

Report.save = (name, type, text) => {
  const link = Report.element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// The clipboard needs a secure page; a file on disk may not be one, so there is the older way too.
Report.copy = async (text, button) => {
  const before = button.dataset.label ?? (button.dataset.label = button.textContent);
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = Report.element("textarea", { value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "copied" : "not copied";
  setTimeout(() => { button.textContent = before; }, 1500);
};
