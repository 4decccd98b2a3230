"use strict";
// Draws the figures of the chosen panel, one after the other, and again when the slice, the theme or the panel changes.
Report.theme = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { page: of("page"), text: of("text"), soft: of("soft"), line: of("line"), floor: of("floor"), warn: of("warn") };
};

const baseLayout = (theme) => {
  const axis = { gridcolor: theme.line, linecolor: theme.soft, zerolinecolor: theme.soft, automargin: true, tickcolor: theme.soft, ticks: "outside" };
  return {
    axis, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 430, margin: { l: 60, r: 20, t: 34, b: 50 },
    font: { family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 13, color: theme.text }, hovermode: "closest", showlegend: true,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.soft, activecolor: theme.text },
    legend: { traceorder: "normal", orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left" }, hoverlabel: { font: { size: 13 } },
  };
};

// Ticks of a logarithmic axis with plain labels: 1, 2, 5 in every decade, or powers of ten where there are many.
Report.logTicks = (values) => {
  const good = values.filter((value) => value !== null && value > 0);
  if (!good.length) return {};
  const [low, high] = [Math.log10(Math.min(...good)), Math.log10(Math.max(...good))];
  const steps = high - low > 2.5 ? [1] : [1, 2, 5];
  const tickvals = [];
  for (let decade = Math.floor(low) - 1; decade <= Math.ceil(high) + 1; decade += 1) tickvals.push(...steps.map((step) => step * 10 ** decade));
  return { tickvals, ticktext: tickvals.map((value) => (value >= 1 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(1))))) };
};

const titled = (axis, title) => ({ ...axis, title: { text: title ?? "", standoff: 8 } });

Report.drawFigure = async (element) => {
  const name = element.dataset.figure;
  const figure = Report.panel.figures[name];
  const plot = element.querySelector(".plot");
  const absent = element.querySelector(".absent");
  const slicer = element.querySelector(".slicer");
  const numbers = element.querySelector(".numbers");
  absent.hidden = !figure.empty;
  absent.textContent = figure.empty ?? "";
  plot.hidden = numbers.hidden = element.querySelector("figcaption").hidden = Boolean(figure.empty);
  slicer.hidden = figure.slices.length < 2;
  if (figure.empty) {
    Plotly.purge(plot);
    return;
  }
  const slice = chosenSlice(figure, slicer.querySelector("select"), name);
  const theme = { ...Report.theme(), width: plot.clientWidth };
  const { traces, layout, table } = await Report.kinds[figure.kind](slice, name, theme);
  const { axis, ...base } = baseLayout(theme);
  const merged = { ...base, ...layout };
  for (const side of ["xaxis", "yaxis"]) merged[side] = titled({ ...axis, ...layout[side] }, layout[side].title);
  if (innerWidth < 600) merged.margin = { l: 44, r: 8, t: 12, b: 44 };
  const config = {
    responsive: true, displaylogo: false, displayModeBar: innerWidth >= 600, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud", "downloadJson", "zoomIn2d", "zoomOut2d", "pan2d"],
    toImageButtonOptions: { format: "svg", filename: `${name}-${Report.panel.slug}` },
  };
  await Plotly.react(plot, traces, merged, config);
  const shown = `${figure.slices.length > 1 ? `${slice.label}: ` : ""}${Report.panel.label}`;
  numbers.querySelector(".scroll").replaceChildren(Report.plainTable(table[0], table[1], shown));
};

const chosenSlice = (figure, select, name) => {
  const wanted = Report.address.get(name);
  const labels = figure.slices.map((slice) => slice.label);
  select.replaceChildren(...labels.map((label) => Report.element("option", { value: label }, label)));
  select.value = labels.includes(wanted) ? wanted : labels[0];
  return figure.slices[labels.indexOf(select.value)];
};

Report.drawAll = async () => {
  const turn = (Report.turn = (Report.turn ?? 0) + 1);
  for (const element of document.querySelectorAll("figure[data-figure]")) {
    if (turn !== Report.turn) return; // another panel or theme was chosen meanwhile
    try {
      await Report.drawFigure(element);
    } catch (error) {
      const absent = element.querySelector(".absent");
      absent.hidden = false;
      absent.textContent = `This figure cannot be drawn: ${error.message}`;
    }
    await new Promise((resume) => setTimeout(resume)); // let the page answer between two figures
  }
  document.documentElement.dataset.drawn = Report.panel.slug;
};

Report.choosePanel = () => {
  const wanted = Report.address.get("panel");
  Report.panel = Report.panels.find((panel) => panel.slug === wanted) ?? Report.panels[0];
  const select = document.getElementById("panel");
  select.value = Report.panel.slug;
  for (const part of document.querySelectorAll(".of-panel")) part.hidden = part.dataset.panel !== Report.panel.slug;
  delete document.documentElement.dataset.drawn;
  return Report.drawAll();
};

Report.startFigures = () => {
  document.getElementById("panel").addEventListener("change", (event) => {
    Report.address.set({ panel: event.target.value });
    Report.choosePanel();
  });
  for (const element of document.querySelectorAll("figure[data-figure]")) {
    element.querySelector("select").addEventListener("change", (event) => {
      Report.address.set({ [element.dataset.figure]: event.target.value });
      Report.drawFigure(element);
    });
  }
};
