"use strict";
// Kinds of figures that show one cell, or one case over time.
const PARTS = ["#2a78d6", "#009271", "#d55e00", "#8a7a1f", "#c065a0", "#7a7f87", "#7a5cc9", "#b0403f"];
const PATTERNS = ["", "/", "x", ".", "-", "|", "+", "\\"];

const partsOf = (rows, column) => [...new Set(rows.flatMap((row) => Object.keys(Report.value(row, column) ?? {})))];

Report.kinds.stack = (slice, name, theme) => {
  const parts = partsOf(slice.rows, "bytes");
  const backends = slice.rows.map((row) => Report.value(row, "backend"));
  const megabytes = (row, part) => (Report.value(row, "bytes")[part] ?? null) === null ? null : Report.value(row, "bytes")[part] / 1e6;
  const total = (row) => Object.values(Report.value(row, "bytes")).reduce((sum, value) => sum + value, 0) / 1e6;
  const measured = slice.rows.map((row) => Report.value(row, "dram_bytes_measured"));
  const traces = parts.map((part, place) => ({
    type: "bar", orientation: "h", name: part.replaceAll("_", " "), y: backends, x: slice.rows.map((row) => megabytes(row, part)),
    marker: { color: PARTS[place % PARTS.length], pattern: { shape: PATTERNS[place % PATTERNS.length], bgcolor: PARTS[place % PARTS.length], fgcolor: theme.page, size: 7, solidity: 0.2 } },
    hovertemplate: "%{y}, %{fullData.name}: %{x:,.4~g} MB<extra></extra>",
  }));
  if (measured.some((value) => value !== null)) {
    traces.push({
      name: "measured DRAM bytes", mode: "markers", y: backends, x: measured.map((value) => (value === null ? null : value / 1e6)),
      marker: { symbol: "diamond", size: 13, color: theme.floor, line: { color: theme.page, width: 2 } },
      hovertemplate: "%{y}, measured: %{x:,.4~g} MB<extra></extra>",
    });
  }
  const body = slice.rows.map((row, place) => [
    backends[place], ...parts.map((part) => megabytes(row, part)), total(row),
    measured[place] === null ? "not measured" : measured[place] / 1e6, measured[place] === null ? "-" : measured[place] / 1e6 / total(row)]);
  return {
    traces, table: [["backend", ...parts.map((part) => `${part.replaceAll("_", " ")}, MB`), "analytic, MB", "measured, MB", "measured / analytic"], body],
    layout: {
      barmode: "stack", height: 190 + 42 * backends.length, xaxis: { title: "MB per step", rangemode: "tozero" },
      yaxis: { automargin: true, autorange: "reversed", type: "category" },
      annotations: slice.rows.map((row, place) => ({
        x: Math.max(total(row), (measured[place] ?? 0) / 1e6), y: backends[place], text: `${Report.number(total(row))} MB`, showarrow: false,
        xanchor: "left", xshift: 12 })),
    },
  };
};

Report.kinds.stages = (slice, name, theme) => {
  const stages = partsOf(slice.rows, "stages_us");
  const words = stages.map((stage) => stage.replaceAll("_", " "));
  const traces = slice.rows.map((row) => {
    const backend = Report.value(row, "backend");
    return {
      type: "bar", name: backend, x: words, y: stages.map((stage) => Report.value(row, "stages_us")[stage] ?? null), offsetgroup: backend,
      marker: { color: Report.styles[backend].color }, hovertemplate: "%{fullData.name}, %{x}: %{y:.4~g} µs<extra></extra>",
    };
  });
  const floors = stages.map((stage) => slice.rows.map((row) => (Report.value(row, "stage_floors_us") ?? {})[stage]).find((floor) => floor !== undefined) ?? null);
  traces.push({
    name: "floor: bytes at the read roof", mode: "markers", x: words, y: floors,
    marker: { symbol: "line-ew", size: Math.min(90, (0.55 * theme.width) / stages.length / 2), line: { color: theme.floor, width: 3 } }, hovertemplate: "%{x}: floor %{y:.4~g} µs<extra></extra>",
  });
  const body = slice.rows.flatMap((row) => stages.map((stage) => {
    const time = Report.value(row, "stages_us")[stage] ?? null;
    const floor = (Report.value(row, "stage_floors_us") ?? {})[stage] ?? null;
    const share = time !== null && floor !== null ? `${((100 * floor) / time).toFixed(0)} %` : "-";
    return [`${Report.value(row, "backend")}, ${stage}`, time, floor, time !== null && floor !== null ? time - floor : null, share];
  }));
  return {
    traces, layout: { barmode: "group", xaxis: { type: "category" }, yaxis: { title: "time, µs", rangemode: "tozero" } },
    table: [["backend, stage", "time, µs", "floor, µs", "above floor, µs", "of roof"], body],
  };
};

Report.kinds.rounds = async (slice, name, theme) => {
  const records = await Report.records();
  const traces = [];
  const body = [];
  for (const row of slice.rows) {
    const backend = Report.value(row, "backend");
    const rounds = (records[row].rounds_ns ?? []).filter((samples) => samples.length);
    const middle = Report.value(row, "latency_us") * 1e3;
    const { color, symbol } = Report.styles[backend];
    const share = (value) => value / middle - 1;
    const medians = rounds.map((samples) => Report.median(samples));
    const place = (index, sample, count) => index + 1 + (count > 1 ? (sample / (count - 1) - 0.5) * 0.8 : 0);
    if (rounds.some((samples) => samples.length > 1)) {
      traces.push({
        mode: "markers", showlegend: false, legendgroup: backend, hoverinfo: "skip", marker: { color, symbol, size: 3, opacity: 0.45 },
        x: rounds.flatMap((samples, index) => samples.map((_, sample) => place(index, sample, samples.length))),
        y: rounds.flatMap((samples) => samples.map(share)),
      });
    }
    traces.push({
      ...Report.line(backend, theme), ...(rounds.length > 60 ? { mode: "lines" } : {}), legendgroup: backend, x: rounds.map((_, index) => index + 1), y: medians.map(share), customdata: medians.map((value) => value / 1e3),
      hovertemplate: "%{fullData.name}, round %{x}: %{customdata:.5~g} µs (%{y:+.2%})<extra></extra>",
    });
    const all = rounds.flat();
    const least = all.reduce((one, two) => Math.min(one, two), Infinity);
    const most = all.reduce((one, two) => Math.max(one, two), 0);
    body.push([backend, rounds.length, all.length, middle / 1e3, all.length ? least / 1e3 : null, all.length ? most / 1e3 : null, Report.value(row, "stop_reason") ?? "-"]);
  }
  const clocks = clockTraces(slice.rows, records, theme);
  const layout = {
    xaxis: { title: "round, in time order", zeroline: false }, height: clocks.length ? 560 : 430,
    yaxis: { title: "difference from the row's median", tickformat: "+.1%", zeroline: true, ...(clocks.length ? { domain: [0.34, 1] } : {}) },
  };
  if (clocks.length) layout.xaxis.anchor = "y2";
  if (clocks.length) layout.yaxis2 = { title: { text: "SM clock, MHz" }, domain: [0, 0.26], gridcolor: theme.line, automargin: true };
  return {
    traces: [...traces, ...clocks], layout,
    table: [["backend", "rounds", "samples", "median, µs", "least, µs", "most, µs", "why it stopped"], body],
  };
};

// Clocks at the end of each round, under the samples; nothing where they were not read.
const clockTraces = (rows, records, theme) => rows.flatMap((row) => {
  const clocks = records[row].meters?.sm_mhz;
  if (!clocks?.some((value) => value !== null)) return [];
  const backend = Report.value(row, "backend");
  return [{
    ...Report.line(backend, theme), mode: "lines", yaxis: "y2", legendgroup: backend, showlegend: false,
    x: clocks.map((_, index) => index + 1), y: clocks, hovertemplate: "%{fullData.name}, round %{x}: %{y:.0f} MHz<extra></extra>",
  }];
});

Report.median = (values) => {
  const sorted = [...values].sort((one, two) => one - two);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

Report.kinds.history = (slice, name, theme) => {
  const traces = slice.lines.map(({ backend, rows }) => ({
    ...Report.line(backend, theme), x: rows.map((row) => Report.value(row, "time")), y: rows.map((row) => Report.value(row, "latency_us")),
    error_y: Report.errorBars(rows, "latency_us", "latency_ci95_us", Report.styles[backend].color),
    customdata: rows.map((row) => String(Report.value(row, "commit") ?? "no commit").slice(0, 10)),
    hovertemplate: "%{fullData.name}<br>%{x}, %{customdata}<br>%{y:.4~g} µs<extra></extra>",
  }));
  const body = slice.lines.flatMap(({ backend, rows }) => rows.filter((row) => row >= 0).map((row) => [
    backend, Report.value(row, "time"), String(Report.value(row, "commit") ?? "-").slice(0, 10), Report.value(row, "latency_us"), Report.bracket(Report.value(row, "latency_ci95_us"))]));
  return {
    traces, layout: { xaxis: { title: "time", type: "date" }, yaxis: { title: "latency, µs", rangemode: "tozero" } },
    table: [["backend", "time", "commit", "latency, µs", "95 % interval"], body],
  };
};
