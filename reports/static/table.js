"use strict";
// The table of all rows: sorted, filtered, a hundred at a time; what it shows is in the address and goes into the CSV.
const COLUMNS = [ // [key, heading, text of a row, numeric]
  ["model", "model"], ["level", "level"], ["ctx", "context", (row) => Report.size(Report.value(row, "ctx")), true],
  ["batch", "batch", null, true], ["budget", "budget", (row) => (Report.value(row, "budget") === null ? "-" : Report.size(Report.value(row, "budget"))), true],
  ["backend", "backend"], ["outcome", "outcome"],
  ["reason", "reason or flag", (row) => [Report.value(row, "reason"), ...Report.value(row, "flags")].filter(Boolean).join("; ") || "-"],
  ["latency_us", "latency, µs [95 %]", (row) => interval(row, "latency_us", "latency_ci95_us"), true],
  ["speedup_vs_best_dense", "x dense [95 %]", (row) => interval(row, "speedup_vs_best_dense", "speedup_ci95", Report.value(row, "flags").length ? " !" : ""), true],
  ["kv_bytes_per_step", "KV, MB", (row) => scaled(row, "kv_bytes_per_step", 1e-6), true],
  ["dram_bytes_measured", "DRAM measured, MB", (row) => scaled(row, "dram_bytes_measured", 1e-6), true],
  ["bandwidth_tbps", "TB/s", null, true], ["roof_share", "% of roof", (row) => scaled(row, "roof_share", 100), true],
  ["tokens_per_s", "tokens/s", null, true], ["energy_j_per_token", "J/token", null, true],
  ["ttft_us", "first token, µs", null, true], ["kv_capacity_tokens", "KV cache, tokens", null, true],
  ["plan_us", "planning, µs", null, true], ["eager_us", "without graph, µs", null, true],
  ["plan", "KV plan"], ["cache_state", "cache"], ["machine", "machine"], ["commit", "commit", (row) => (Report.value(row, "commit") ?? "-").slice(0, 10)],
  ["time", "time"], ["state", "state"],
];
const FILTERS = ["machine", "model", "level", "ctx", "batch", "budget", "backend", "outcome", "state"];
const PAGE = 100;
const ACTIONS = ["command", "record"];
const shownColumns = () => COLUMNS.filter(([key]) => { // a column that is empty in every row only costs width
  if (key === "reason") return Report.columns.reason.some(Boolean) || Report.columns.flags.some((flags) => flags.length);
  return Report.columns[key].some((value) => value !== null);
});

const interval = (row, name, ci, mark = "") => `${Report.number(Report.value(row, name))} ${Report.bracket(Report.value(row, ci))}${mark}`.trim();
const scaled = (row, name, factor) => Report.number(Report.value(row, name) === null ? null : Report.value(row, name) * factor);
const textOf = ([key, , text], row) => {
  if (text) return text(row);
  const value = Report.value(row, key);
  return typeof value === "number" && key !== "batch" ? Report.number(value) : String(value ?? "-");
};

Report.table = { shown: PAGE, rows: [] };

// Filters and order come from the address, so there is one place that holds them.
Report.table.update = () => {
  const { address, table } = Report;
  const wanted = FILTERS.map((name) => [name, address.get(name)]).filter(([, value]) => value !== "");
  const search = address.get("search").toLowerCase();
  let rows = [...Array(Report.count).keys()].filter((row) => wanted.every(([name, value]) => String(Report.value(row, name)) === value));
  if (search) rows = rows.filter((row) => COLUMNS.some((column) => textOf(column, row).toLowerCase().includes(search)));
  const [key, direction] = [address.get("sort"), address.get("order") === "down" ? -1 : 1];
  if (COLUMNS.some((column) => column[0] === key)) rows.sort((one, two) => compare(Report.value(one, key), Report.value(two, key), direction) || one - two);
  table.rows = rows;
  draw();
};

const compare = (one, two, direction) => { // absent is last, up or down
  if (one === null || two === null) return (one === null) - (two === null);
  return direction * (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two)));
};

const draw = () => {
  const { table, element } = Report;
  const rows = table.rows.slice(0, table.shown);
  const [sort, order] = [Report.address.get("sort"), Report.address.get("order")];
  const heads = table.columns.map(([key, label, , numeric]) => {
    const head = element("th", { scope: "col", className: numeric ? "number" : "" }, element("button", { type: "button" }, label));
    head.firstChild.dataset.sort = key;
    if (key === sort) head.setAttribute("aria-sort", order === "down" ? "descending" : "ascending");
    return head;
  });
  heads.splice(table.actionsAt, 0, ...ACTIONS.map((label) => element("th", { scope: "col" }, label)));
  const target = document.querySelector("table.data");
  target.replaceChildren(
    element("caption", {}, "Every row of these records. A heading sorts by its column; “!” marks a speed-up above the ratio of the bytes."),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows.map(rowElement)));
  document.querySelector("#rows .shown").textContent = `${table.rows.length.toLocaleString("en-US")} of ${Report.count.toLocaleString("en-US")} rows match`;
  const more = document.querySelector("#rows .more");
  more.hidden = table.rows.length <= table.shown;
  more.textContent = `Show ${Math.min(PAGE, table.rows.length - table.shown)} more of ${(table.rows.length - table.shown).toLocaleString("en-US")}`;
};

const rowElement = (row) => {
  const { element, table } = Report;
  const cells = table.columns.map((column) => {
    const cell = element(column[0] === "backend" ? "th" : "td", { className: column[3] ? "number" : column[0] }, textOf(column, row));
    if (column[0] === "backend") {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = Report.styles[Report.value(row, "backend")].color;
      cell.scope = "row";
      cell.prepend(swatch);
    }
    return cell;
  });
  const where = `${Report.value(row, "backend")}, ${Report.cell(row)}`;
  const button = (label, action, words) => {
    const made = element("button", { type: "button" }, label);
    Object.assign(made.dataset, { action, row });
    made.setAttribute("aria-label", `${words} ${where}`);
    return element("td", {}, made);
  };
  const failed = Report.value(row, "outcome") !== "OK";
  cells.splice(table.actionsAt, 0, button("copy", "command", "copy the command of"), button("show", "record", "show the record of"));
  return element("tr", { className: failed ? "failed" : "" }, ...cells);
};

const csvText = (value) => {
  const text = value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const safe = typeof value === "string" && /^[=+\-@]/.test(text) ? `'${text}` : text; // a spreadsheet must not run it
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

Report.table.csv = () => {
  const names = Object.keys(Report.columns);
  return [names, ...Report.table.rows.map((row) => names.map((name) => Report.value(row, name)))].map((line) => line.map(csvText).join(",")).join("\n");
};

const fillFilters = () => {
  const form = document.querySelector("#rows .filters");
  const { element } = Report;
  const change = (name, value) => {
    Report.table.shown = PAGE;
    Report.address.set({ [name]: value }, "rows");
    Report.table.update();
  };
  for (const name of FILTERS) {
    const values = [...new Set(Report.columns[name])].filter((value) => value !== null)
      .sort((one, two) => (typeof one === "number" ? one - two : String(one).localeCompare(String(two))));
    if (values.length < 2) continue;
    const words = (value) => (["ctx", "budget"].includes(name) ? Report.size(value) : String(value));
    const select = element("select", { name, onchange: (event) => change(name, event.target.value) },
      element("option", { value: "" }, "all"), ...values.map((value) => element("option", { value: String(value) }, words(value))));
    form.append(element("label", {}, name === "ctx" ? "context" : name, select));
  }
  const search = element("input", { name: "search", type: "search", oninput: (event) => change("search", event.target.value) });
  form.append(element("label", {}, "any text", search));
  form.addEventListener("submit", (event) => event.preventDefault());
};

Report.table.show = () => { // controls follow the address
  for (const control of document.querySelectorAll("#rows .filters [name]")) control.value = Report.address.get(control.name);
  Report.table.update();
};

Report.table.start = () => {
  Report.columns.state = Report.columns.current.map((current) => (current ? "latest" : "superseded"));
  Report.table.columns = shownColumns();
  Report.table.actionsAt = Report.table.columns.findIndex(([key]) => key === "outcome") + 1;
  fillFilters();
  const section = document.getElementById("rows");
  section.addEventListener("click", (event) => {
    const { sort, action, row } = event.target.dataset;
    if (sort) {
      const again = Report.address.get("sort") === sort;
      const down = again && Report.address.get("order") !== "down";
      Report.address.set(again && !down ? { sort: "", order: "" } : { sort, order: down ? "down" : "up" }, "rows");
      Report.table.update();
      document.querySelector(`table.data [data-sort="${sort}"]`).focus();
    }
    if (action === "command") Report.copy(Report.value(Number(row), "command"), event.target);
    if (action === "record") Report.showRecord(Number(row));
  });
  section.querySelector(".more").addEventListener("click", () => { Report.table.shown += PAGE; draw(); });
  section.querySelector(".csv").addEventListener("click", () => Report.save("locks-bench-rows.csv", "text/csv", Report.table.csv()));
  section.querySelector(".clear").addEventListener("click", () => {
    Report.address.set(Object.fromEntries([...FILTERS, "search", "sort", "order"].map((name) => [name, ""])), "rows");
    Report.table.show();
  });
  Report.table.show();
};
