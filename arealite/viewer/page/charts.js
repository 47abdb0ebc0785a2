"use strict";
// What the pages share. Everything a model or a data set wrote reaches a page through textContent only.
const $ = (selector) => document.querySelector(selector);

function element(tag, className, text, children = []) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

const number = (value, digits = 3) => String(Number(value.toFixed(digits)));

// Charts: colours are names of CSS variables, looked up again whenever the colour scheme changes.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const coloured = (value) => JSON.parse(JSON.stringify(value).replace(/"(--\w+)"/g, (_, name) => JSON.stringify(css(name))));

const lastStepOf = (charts) =>
  charts.filter((chart) => !chart.layout.xaxis).reduce((last, chart) => chart.traces.reduce((most, trace) => Math.max(most, trace.x.at(-1) ?? 1), last), 1);

function layoutOf(chart, lastStep) {
  const axis = { gridcolor: css("--rule"), zerolinecolor: css("--rule"), linecolor: css("--rule"), tickcolor: css("--rule"), automargin: true };
  return {
    ...chart.layout,
    height: 250, margin: { l: 44, r: chart.layout.yaxis2 ? 52 : 10, t: 12, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
    xaxis: { ...axis, showgrid: false, title: { text: "step", standoff: 4 }, range: [-0.012 * lastStep, 1.012 * lastStep], ...chart.layout.xaxis },
    yaxis: { ...axis, ...chart.layout.yaxis, nticks: 6 },
    ...(chart.layout.yaxis2 && { yaxis2: { ...axis, ...chart.layout.yaxis2, nticks: 6 } }),
    hovermode: "x unified", hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--faint"), font: { color: css("--ink") } },
    showlegend: chart.traces.length > 1, legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom" },
  };
}

// Plotly reads names of curves as markup.
const asText = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function drawChart(plot, chart, lastStep) {
  const traces = chart.traces.map((trace) => (trace.name ? { ...trace, name: asText(trace.name) } : trace));
  return Plotly.react(plot, coloured(traces), layoutOf(chart, lastStep), { displayModeBar: false, responsive: true });
}

function chartNode(chart) {
  const title = element("h3", "", chart.title, chart.unit ? [element("span", "", `  ${chart.unit}`)] : []);
  return element("div", "chart", undefined, [title, element("div", "plot")]);
}
