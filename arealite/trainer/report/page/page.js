"use strict";
// Everything a model or a data set wrote reaches the page through textContent only.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector) => document.querySelector(selector);

function element(tag, className, text, children = []) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

// Charts: colours are names of CSS variables, looked up again whenever the colour scheme changes.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const coloured = (value) => JSON.parse(JSON.stringify(value).replace(/"(--\w+)"/g, (_, name) => JSON.stringify(css(name))));

const lastStep = Math.max(1, ...data.charts.filter((chart) => !chart.layout.xaxis).flatMap((chart) => chart.traces.flatMap((trace) => trace.x)));

function layoutOf(chart) {
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

function drawCharts() {
  for (const [i, chart] of data.charts.entries()) {
    Plotly.react(`plot-${i}`, coloured(chart.traces), layoutOf(chart), { displayModeBar: false, responsive: true });
  }
}

if (data.charts.length) {
  for (const [i, chart] of data.charts.entries()) {
    const title = element("h3", "", chart.title, chart.unit ? [element("span", "", `  ${chart.unit}`)] : []);
    const plot = element("div", "plot");
    plot.id = `plot-${i}`;
    $(".charts").append(element("div", "chart", undefined, [title, plot]));
  }
  $("#curves").hidden = false;
  drawCharts();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
}

const number = (value, digits = 3) => String(Number(value.toFixed(digits)));

// Before and after: the same held-out prompts.
const CHANGES = {
  learned: "Wrong, then correct", kept: "Correct both times", lost: "Correct, then wrong", never: "Wrong both times",
  always: "Always solved", sometimes: "Sometimes solved", unsolved: "Never solved",
  better: "Higher reward", equal: "Equal reward", worse: "Lower reward",
};

function answer(when, text, reward, other) {
  const isBinary = data.beforeAfter.is_binary;
  const difference = isBinary ? reward - 0.5 : reward - other;
  const verdict = element("b", "", isBinary ? (reward ? "correct" : "wrong") : `reward ${number(reward)}`);
  const title = element("h4", "", `${when}: `, [verdict]);
  return element("div", `answer ${["lower", "", "higher"][Math.sign(difference) + 1]}`, undefined, [title, element("pre", "", text)]);
}

const PAIRS_AT_ONCE = 5;
let numPairsShown = PAIRS_AT_ONCE;
let change = "all";

function showPairs() {
  const { pairs, first, last } = data.beforeAfter;
  const titles = (pair) => pair.titles ?? [`Before (step ${first})`, `After (step ${last})`];
  const shown = pairs.filter((pair) => change === "all" || pair.change === change);
  const nodes = shown.slice(0, numPairsShown).map((pair) => element("div", "pair", undefined, [
    element("p", "question", pair.prompt),
    element("div", "answers", undefined, [
      answer(titles(pair)[0], pair.before, ...pair.rewards),
      answer(titles(pair)[1], pair.after, ...pair.rewards.toReversed()),
    ]),
  ]));
  $(".pairs").replaceChildren(...(nodes.length ? nodes : [element("p", "note", "None.")]));
  $("#before-after .more").hidden = shown.length <= numPairsShown;
  for (const button of document.querySelectorAll("#before-after .filters button")) {
    button.setAttribute("aria-pressed", String(button.dataset.change === change));
  }
}

if (data.beforeAfter) {
  const { counts, num_pairs: numPairs, pairs, heading } = data.beforeAfter;
  if (heading) $("#before-after h2").textContent = heading;
  const cut = pairs.length < numPairs ? ` The first of each kind can be read here; the counts are of all.` : "";
  $("#before-after .note").textContent = `${numPairs} held-out prompts, in the order of the data set.${cut}`;
  for (const [kind, count] of [["all", numPairs], ...Object.entries(counts)]) {
    const button = element("button", "", `${CHANGES[kind] ?? "All"} (${count})`);
    button.type = "button";
    button.dataset.change = kind;
    button.addEventListener("click", () => { change = kind; numPairsShown = PAIRS_AT_ONCE; showPairs(); });
    $("#before-after .filters").append(button);
  }
  $("#before-after .more").addEventListener("click", () => { numPairsShown += 2 * PAIRS_AT_ONCE; showPairs(); });
  $("#before-after").hidden = false;
  showPairs();
}

// Trajectories.
const ROWS_AT_ONCE = 12;
const isBinary = data.trajectories.every((row) => row.reward === 0 || row.reward === 1);
const staleness = (row) => row.step - Math.min(...row.versions.map(([version]) => version));
const ORDERS = {
  "stored": () => 0,
  "reward-down": (a, b) => b.reward - a.reward,
  "reward-up": (a, b) => a.reward - b.reward,
  "tokens-down": (a, b) => b.num_tokens - a.num_tokens,
  "stale-down": (a, b) => staleness(b) - staleness(a),
};
let numRowsShown = ROWS_AT_ONCE;

function strip(row) {
  const parts = row.versions.map(([version, count]) => {
    const part = element("i");
    part.style.flex = String(count);
    part.style.opacity = String(Math.max(0.25, 1 - 0.25 * (row.step - version)));
    return part;
  });
  const node = element("span", "strip", undefined, parts);
  node.title = versionsOf(row);
  return node;
}

const versionsOf = (row) => row.versions.map(([version, count]) => `${count} tokens by version ${version}`).join(", then ");

const TITLES = { given: "Given", sampled: "Sampled" };

function details(row) {
  const logprob = row.mean_logprob === null ? "" : `mean logprob ${number(row.mean_logprob)}; `;
  const facts = `Prompt ${row.prompt_id}, sample ${row.sample}, row ${row.row}, attempt ${row.attempt}, server ${row.server || "unknown"}; ${logprob}` +
    `${versionsOf(row)}; trained at step ${row.step}.`;
  return element("div", "text", undefined, [
    element("p", "facts", facts),
    ...row.segments.map(([kind, text]) => element("div", "", undefined, [element("h4", "", TITLES[kind]), element("pre", "", text)])),
  ]);
}

function rowNode(row) {
  const summary = element("summary", "", undefined, [
    element("span", "step", String(row.step)), element("span", "prompt", row.prompt_id), element("span", "sample", String(row.sample)),
    element("span", isBinary ? `reward ${row.reward ? "correct" : "wrong"}` : "reward", number(row.reward)),
    element("span", "tokens number", String(row.num_tokens)), strip(row), element("span", "snippet", row.snippet),
  ]);
  const node = element("details", "row", undefined, [summary]);
  node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(details(row)); });
  return node;
}

function showRows() {
  const step = $("#step").value;
  const rows = data.trajectories.filter((row) => step === "all" || String(row.step) === step).sort(ORDERS[$("#order").value]);
  const titles = [["Step"], ["Prompt"], ["#"], ["Reward", "number"], ["Tokens", "number"], ["Versions"], ["Completion"]];
  const columns = element("div", "columns", undefined, titles.map(([title, className]) => element("span", className, title)));
  $(".rows").replaceChildren(columns, ...rows.slice(0, numRowsShown).map(rowNode));
  $("#trajectories .more").hidden = rows.length <= numRowsShown;
}

if (data.trajectories.length) {
  const steps = [...new Set(data.trajectories.map((row) => row.step))];
  $("#step").append(...["all", ...steps].map((step) => element("option", "", String(step))));
  $("#step").value = String(steps.at(-1));
  $("#trajectories .note").textContent = `${data.trajectories.length} samples from ${steps.length} of ${data.numStoredSteps} steps; ` +
    "all of them are in rollouts/. The bar shows which share of the answer each version of the weights sampled: the paler, the staler.";
  for (const id of ["#step", "#order"]) $(id).addEventListener("change", () => { numRowsShown = ROWS_AT_ONCE; showRows(); });
  $("#trajectories .more").addEventListener("click", () => { numRowsShown += ROWS_AT_ONCE; showRows(); });
  $("#trajectories").hidden = false;
  showRows();
}
