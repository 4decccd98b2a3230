"use strict";
// What selectors keep against what they cost: one line per selector, its budgets from left to right.
Report.kinds.fidelity = (slice, name, theme) => {
  const [x, title] = name === "fidelity" ? ["bytes_per_step", "bytes of a step, MB"] : ["latency_us", "latency, µs"];
  const factor = name === "fidelity" ? 1e-6 : 1;
  const rows = Report.fidelityRows;
  const traces = slice.lines.map(({ backend, rows: places }) => {
    const points = places.map((place) => rows[place]);
    const side = (point, bound) => (point.mass_of_oracle_ci95 ? Math.abs(point.mass_of_oracle_ci95[bound] - point.mass_of_oracle) : 0);
    return {
      ...Report.line(backend, theme), x: points.map((point) => point[x] * factor), y: points.map((point) => point.mass_of_oracle),
      error_y: {
        type: "data", symmetric: false, thickness: 1.5, width: 4, color: Report.styles[backend].color,
        array: points.map((point) => side(point, 1)), arrayminus: points.map((point) => side(point, 0)),
      },
      customdata: points.map((point) => point.budget), hovertemplate: `%{fullData.name}, budget %{customdata}<br>%{x:.4~g} ${title.split(", ")[1]}<br>mass %{y:.4f}<extra></extra>`,
    };
  });
  const three = (value, bounds) => (value === null ? "-" : `${value.toFixed(3)}${bounds ? ` [${bounds.map((bound) => bound.toFixed(3)).join(", ")}]` : ""}`);
  const body = slice.lines.flatMap(({ backend, rows: places }) => places.map((place) => {
    const row = rows[place];
    return [backend, Report.size(row.budget), row.bytes_per_step / 1e6, `${row.fewer_bytes.toFixed(1)}x`, ...["mass_of_oracle", "recall", "error", "retention_oracle_strict"]
      .map((measure) => three(row[measure], row[`${measure}_ci95`])), row.latency_us];
  }));
  return {
    traces, layout: {
      height: 420 + 8 * slice.lines.length,
      xaxis: { title, type: "log", ...Report.logTicks(traces.flatMap((trace) => trace.x)) },
      yaxis: { title: "mass kept, share of the exact ranking's" },
    },
    table: [["selector", "budget", "MB per step", "fewer bytes", "mass of oracle's", "recall", "output error", "carriers kept", "latency, µs"], body],
  };
};
