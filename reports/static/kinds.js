"use strict";
// Every kind of figure: a slice -> {traces, layout, table: [head, body]}.  Values come from the table of all rows.
Report.kinds = {};

const UNIT = {
  latency: { y: "latency_us", title: "latency, µs", ci: "latency_ci95_us", log: true },
  throughput: { y: "tokens_per_s", title: "tokens per second", log: true },
  roof: { y: "roof_share", title: "share of read roof", percent: true },
  energy: { y: "energy_j_per_token", title: "joules per token", log: true },
};

Report.line = (backend, theme) => {
  const { color, symbol, dash } = Report.styles[backend];
  return {
    name: backend, mode: "lines+markers", connectgaps: false, line: { color, width: 2.5, dash },
    marker: { color, symbol, size: 9, line: { color: theme.page, width: 1 } },
  };
};

// Error bars from the interval column; a row without an interval has no bar.
Report.errorBars = (rows, name, ci, color) => {
  const distance = (row, side) => {
    const bounds = Report.value(row, ci);
    return bounds ? Math.abs(bounds[side] - Report.value(row, name)) : 0;
  };
  return {
    type: "data", symmetric: false, color, thickness: 1.5, width: 4,
    array: rows.map((row) => distance(row, 1)), arrayminus: rows.map((row) => distance(row, 0)),
  };
};

const sizesAxis = (values, title, words) => ({ title, type: "log", tickvals: values, ticktext: values.map(words) });

Report.kinds.lines = (slice, name, theme) => {
  if (name === "pareto") return pareto(slice, theme);
  const unit = UNIT[name];
  const byBatch = name === "throughput";
  const words = byBatch ? String : Report.size;
  const hover = `%{fullData.name}<br>${byBatch ? "batch" : "context"} %{customdata}<br>%{y:.4~g} ${unit.title}<extra></extra>`;
  const traces = slice.lines.map(({ backend, rows }) => ({
    ...Report.line(backend, theme), x: slice.at, y: rows.map((row) => Report.value(row, unit.y)), customdata: slice.at.map(words),
    hovertemplate: hover, ...(unit.ci ? { error_y: Report.errorBars(rows, unit.y, unit.ci, Report.styles[backend].color) } : {}),
  }));
  (slice.floors ?? []).forEach((floor, index) => traces.push({
    name: floor.name, mode: "lines", x: slice.at, y: floor.rows.map((row) => Report.value(row, "floor_us")), connectgaps: false,
    showlegend: theme.width > 500, line: { color: theme.floor, width: 1.5, dash: index % 2 ? "dashdot" : "dot" }, customdata: slice.at.map(words), hovertemplate: hover,
  }));
  const yaxis = { title: unit.title, type: unit.log ? "log" : "linear", ...(unit.log ? Report.logTicks(traces.flatMap((trace) => trace.y)) : {}) };
  if (unit.percent) Object.assign(yaxis, { tickformat: ".0%", rangemode: "tozero" });
  const series = traces.map((trace) => [trace.name, trace.y]);
  return {
    traces, layout: { xaxis: sizesAxis(slice.at, byBatch ? "batch" : "context, tokens", words), yaxis },
    table: [[byBatch ? "batch" : "context", ...series.map(([label]) => label)],
      slice.at.map((at, place) => [words(at), ...series.map(([, values]) => values[place])])],
  };
};

const pareto = (slice, theme) => {
  const traces = slice.lines.map(({ backend, rows }) => ({
    ...Report.line(backend, theme), mode: "lines+markers+text", textposition: "top center", textfont: { size: 11 },
    x: rows.map((row) => Report.value(row, "latency_us")), y: rows.map((row) => Report.value(row, "tokens_per_s")),
    text: slice.at.map((batch) => `B ${batch}`),
    hovertemplate: "%{fullData.name}<br>%{text}<br>%{x:.4~g} µs<br>%{y:.4~g} tokens per second<extra></extra>",
  }));
  const body = slice.lines.flatMap(({ backend, rows }) => rows.map((row, place) => [
    backend, slice.at[place], Report.value(row, "latency_us"), Report.value(row, "tokens_per_s")]));
  return {
    traces, table: [["backend", "batch", "latency, µs", "tokens per second"], body],
    layout: { xaxis: { title: "latency, µs", type: "log", ...Report.logTicks(traces.flatMap((trace) => trace.x)) },
      yaxis: { title: "tokens per second", type: "log", ...Report.logTicks(traces.flatMap((trace) => trace.y)) }, },
  };
};

// Contexts and batches are evenly spaced; a crossover lies between two of them on a logarithmic scale.
const placeOf = (contexts, tokens) => {
  const after = contexts.findIndex((ctx) => ctx >= tokens);
  if (after <= 0) return after;
  const [low, high] = [contexts[after - 1], contexts[after]];
  return after - 1 + Math.log(tokens / low) / Math.log(high / low);
};

Report.kinds.heat = (slice, name, theme) => {
  const values = slice.rows.map((line) => line.map((row) => Report.value(row, "speedup_vs_best_dense")));
  const logs = values.map((line) => line.map((value) => (value === null ? null : Math.log2(value))));
  const reach = Math.max(1, ...logs.flat().filter((value) => value !== null).map(Math.abs));
  const ticks = [-3, -2, -1, 0, 1, 2, 3, 4].filter((tick) => Math.abs(tick) <= reach);
  const label = (value, line, place) => (value === null ? slice.outcomes[line][place] : `${value.toFixed(2)}x`);
  const text = values.map((line, index) => line.map((value, place) => label(value, index, place)));
  const intervals = slice.rows.map((line) => line.map((row) => Report.bracket(Report.value(row, "speedup_ci95"))));
  const blanks = [];
  values.forEach((line, index) => line.forEach((value, place) => {
    if (value === null) {
      blanks.push({ x: place, y: index, text: slice.outcomes[index][place], showarrow: false, font: { color: theme.warn, size: 11 } });
    }
  }));
  const traces = [{
    type: "heatmap", z: logs, text: values.map((line, index) => line.map((value, place) => (value === null ? "" : text[index][place]))), customdata: intervals, texttemplate: "%{text}", hoverongaps: false, xgap: 2, ygap: 2,
    x: slice.at.map((_, place) => place), y: slice.batches.map((_, place) => place), zmin: -reach, zmax: reach,
    colorscale: [[0, "#b34700"], [0.35, "#f0a868"], [0.5, "#f2f1ec"], [0.65, "#86b6ef"], [1, "#184f95"]],
    colorbar: { title: { text: "x dense" }, thickness: 12, tickvals: ticks, ticktext: ticks.map((tick) => `${2 ** tick}x`) },
    hovertemplate: "%{text} %{customdata}<extra></extra>",
  }];
  if (slice.crossings.length) {
    const at = slice.crossings.map((one) => placeOf(slice.at, one.at));
    const side = (one, bound, index) => (one[bound] === null ? 0 : Math.abs(placeOf(slice.at, one[bound]) - at[index]));
    traces.push({
      name: "crossover", mode: "lines+markers", x: at, y: slice.crossings.map((one) => slice.batches.indexOf(one.batch) - 0.34), // under the number of the cell
      line: { color: "#111111", width: 2, dash: "dot" }, marker: { symbol: "diamond", size: 11, color: "#111111", line: { color: "#ffffff", width: 2 } },
      error_x: {
        type: "data", symmetric: false, color: "#111111", array: slice.crossings.map((one, index) => side(one, "high", index)),
        arrayminus: slice.crossings.map((one, index) => side(one, "low", index)),
      },
      text: slice.crossings.map((one) => `${Math.round(one.at).toLocaleString("en-US")} tokens`),
      hovertemplate: "crossover at %{text}<extra></extra>", showlegend: false,
    });
  }
  const axis = (title, labels) => ({ title, tickvals: labels.map((_, place) => place), ticktext: labels, showgrid: false, zeroline: false });
  return {
    traces, layout: {
      xaxis: axis("context, tokens", slice.at.map(Report.size)), yaxis: axis("batch", slice.batches.map(String)), annotations: blanks,
      height: 170 + 46 * slice.batches.length,
    },
    table: [["batch", ...slice.at.map(Report.size)], slice.batches.map((batch, line) =>
      [String(batch), ...text[line].map((cell, place) => `${cell} ${intervals[line][place]}`.trim())])],
  };
};
