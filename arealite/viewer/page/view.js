"use strict";
// The page: which run is open, what of it is shown, and the same requests again while it trains.
const POLL_MS = 2000;
const IDLE_SHARE = 9; // how much longer than a refresh the pause after it is at least
const SLOW_POLLS = 5; // the list of runs and the ledger are asked for at every fifth
const TABS = ["runs", "charts", "rows"];
const quiet = source === saved ? "A saved page, with some of the run's trajectories: `arealite view` shows all." : "";

const state = { run: null, runs: [], beside: [], tab: "runs", described: new Map(), rows: new Rows(), others: new Map(), snippets: new Map(), hits: null, search: 0, row: null, compareWith: null, problems: new Map() };

// What is open stands in the address, so that a reload shows it again.
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  state.tab = TABS.includes(words.get("view")) ? words.get("view") : "runs";
  state.beside = words.getAll("beside");
  return { run: words.get("run"), row: words.has("row") ? Number(words.get("row")) : null };
}

function writeAddress() {
  const words = new URLSearchParams([["view", state.tab], ...(state.run ? [["run", state.run]] : []), ...state.beside.map((run) => ["beside", run])]);
  if (state.row !== null) words.set("row", state.row);
  history.replaceState(null, "", `#${words}`);
}

// Say what is wrong with a part of the page, until the same part is right again.
function tell(part, problem) {
  state.problems.set(part, problem);
  const text = [...new Set([...state.problems.values()].filter(Boolean))].join("\n");
  $("#error").hidden = !text;
  $("#error").textContent = text;
}

async function attempt(part, work) {
  try {
    const value = await work();
    tell(part, "");
    return value;
  } catch (error) {
    if (error instanceof StaleError) return resetRows();
    if (!(error instanceof SourceError)) console.error(error);
    tell(part, error instanceof SourceError ? error.message : `This page failed at its part "${part}": ${error.message}`);
  }
}

// Runs

const ago = (unix_s) => {
  const seconds = Math.max(0, Date.now() / 1000 - unix_s);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
};

async function refreshRuns() {
  const runs = await source.get("runs");
  state.runs = runs;
  const focused = document.activeElement?.dataset?.key;
  $("#runs tbody").replaceChildren(...runs.map((one) => {
    const open = element("button", "link", one.run === "." ? "this run" : one.run);
    open.type = "button";
    open.dataset.key = `open ${one.run}`;
    open.addEventListener("click", () => { openRun(one.run); showTab("charts"); });
    const beside = element("input");
    beside.type = "checkbox";
    beside.checked = state.beside.includes(one.run);
    beside.disabled = one.run === state.run;
    beside.dataset.key = `beside ${one.run}`;
    beside.ariaLabel = `Draw ${one.run} beside`;
    beside.addEventListener("change", () => {
      state.beside = state.beside.filter((run) => run !== one.run).concat(beside.checked ? [one.run] : []);
      writeAddress();
      attempt("charts", refreshCharts);
    });
    const line = element("tr", one.run === state.run ? "open" : "", undefined, [
      element("td", "", undefined, [open]), element("td", "", undefined, [beside]), element("td", "", String(one.steps)),
      element("td", "", one.reward == null ? "" : shown(one.reward)), element("td", "", one.held_out), element("td", "state", one.state), element("td", "", ago(one.changed_unix_s)),
    ]);
    return line;
  }));
  $("#runs .none").hidden = runs.length > 0;
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  return runs;
}

function openRun(run) {
  if (run === state.run) return;
  Object.assign(state, { run, row: null, beside: state.beside.filter((one) => one !== run) });
  state.problems.clear();
  tell("files", "");
  for (const node of document.querySelectorAll("#charts .charts, #charts .cards")) node.replaceChildren();
  state.described.clear();
  resetRows();
  writeAddress();
  wake();
}

// Charts

async function refreshCharts() {
  if (!state.run) return;
  const names = [state.run, ...state.beside];
  const found = await Promise.all(names.map(async (run) => {
    const known = state.described.get(run);
    const value = await source.get("run", { run }, known ? { "If-None-Match": known.tag } : {});
    if (value) state.described.set(run, value);
    return Boolean(value);
  }));
  const shownNow = names.join("\n");
  if (!found.some(Boolean) && state.shownCharts === shownNow) return;
  state.shownCharts = shownNow;
  if (names[0] === state.run && state.tab === "charts") showCharts(names);
  else state.shownCharts = null;
}

function showCharts(names) {
  const all = names.map((run) => state.described.get(run));
  const [main] = all;
  document.title = main.title;
  $("#charts .title").textContent = main.title;
  $("#charts .lead").textContent = [main.lead, ...all.slice(1).map((one, i) => `beside it, dotted: ${titleAmong(all, one, names[i + 1])}`)].join("; ");
  $("#charts .config pre").textContent = main.config;
  $("#charts .config").hidden = !main.config;
  $("#charts .cards").replaceChildren(...main.cards.map(([label, value, note]) =>
    element("div", "card", undefined, [element("dt", "", label), element("dd", "", value), element("p", "", note)])));
  $("#evaluation").hidden = !main.table.length;
  if (main.table.length) $("#evaluation").replaceChildren(...tableOf(main.table[0], main.table.slice(1)).children);
  const charts = besideEachOther(all, names);
  const nodes = $("#charts .charts");
  const titles = charts.map((chart) => chart.title).join("\n");
  if (nodes.dataset.titles !== titles || !nodes.children.length) nodes.replaceChildren(...charts.map(chartNode));
  nodes.dataset.titles = titles;
  const lastStep = lastStepOf(charts);
  nodes.querySelectorAll(".plot").forEach((plot, i) => drawChart(plot, charts[i], lastStep).then(() => {
    plot.removeAllListeners("plotly_click");
    if (!charts[i].layout.xaxis) plot.on("plotly_click", ({ points: [point] }) => showStep(point.x));
  }));
}

// Show the trajectories of a step, at which somebody has clicked in a chart.
function showStep(step) {
  filters.elements["step-from"].value = filters.elements["step-to"].value = step;
  refilter();
  showTab("rows");
}

// Runs whose configs give them the same name are told apart by their folders.
const titleAmong = (all, one, name) => (all.filter((other) => other.title === one.title).length > 1 ? name : one.title);

// The charts of the first run, with the curves of others dotted in them; bars are the first run's alone, and say so.
function besideEachOther(all, names) {
  const [main, ...others] = all;
  if (!others.length) return main.charts;
  const titles = [...new Set(all.flatMap((one) => one.charts.map((chart) => chart.title)))];
  return titles.map((title) => {
    const chart = main.charts.find((one) => one.title === title) ?? { ...others.flatMap((one) => one.charts).find((one) => one.title === title), traces: [] };
    const dotted = others.flatMap((one) => (one.charts.find((other) => other.title === title)?.traces ?? []).filter((trace) => trace.type === "scatter")
      .map((trace) => ({ ...trace, name: `${titleAmong(all, one, names[all.indexOf(one)])}: ${trace.name}`, line: { ...trace.line, dash: "dot" } })));
    const isOfOne = chart.traces.some((trace) => trace.type === "bar");
    return { ...chart, unit: isOfOne ? `${chart.unit}, of ${titleAmong(all, main, names[0])} only` : chart.unit, traces: [...chart.traces, ...dotted] };
  }).filter((chart) => chart.traces.length);
}

// The page

function showTab(tab) {
  state.tab = tab;
  for (const name of TABS) {
    $(`#${name}`).hidden = name !== tab;
    const button = $(`#tab-${name}`);
    button.ariaSelected = String(name === tab);
    button.tabIndex = name === tab ? 0 : -1;
    button.disabled = name !== "runs" && !state.run;
  }
  $("#open-run").textContent = state.run && state.run !== "." && tab === "rows" ? state.run : "";
  writeAddress();
  if (tab === "charts") {
    for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(plot); // none does while it is hidden
    state.shownCharts = null;
    attempt("charts", refreshCharts);
  }
  if (tab === "rows") {
    list.show();
    attempt("pairs", refreshPairs);
  }
}

for (const name of TABS) $(`#tab-${name}`).addEventListener("click", () => showTab(name));
$("[role=tablist]").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || !state.run) return;
  const shownTabs = TABS.filter((name) => !$(`#tab-${name}`).hidden);
  showTab(shownTabs[(shownTabs.indexOf(state.tab) + by + shownTabs.length) % shownTabs.length]);
  $(`#tab-${state.tab}`).focus();
});
$("#export").hidden = source === saved;
$("#export").addEventListener("click", () => attempt("export", exportRows));
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(searchText));
let searchTimer = null;
filters.addEventListener("input", (event) => {
  if (event.target.name !== "text") return refilter();
  clearTimeout(searchTimer);
  searchTimer = setTimeout(searchText, 250);
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && !$("#row").hidden) return closeRow();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || state.tab !== "rows") return;
  if (event.key === "/") { event.preventDefault(); filters.elements.text.focus(); }
  if (event.key === "j") list.step(1);
  if (event.key === "k") list.step(-1);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.shownCharts = null; attempt("charts", refreshCharts); });

// Each part for itself: what is damaged in one hides no other.
async function refresh(isSlow) {
  if (isSlow) await attempt("runs", refreshRuns);
  await attempt("charts", refreshCharts);
  await attempt("rows", refreshRows);
  if (!isSlow || !state.run) return;
  const { run } = state;
  await attempt("ledger", refreshUntrained);
  await attempt("evaluations", async () => {
    const { evaluations } = await source.get("evaluations", { run });
    if (run === state.run) showEvaluations(evaluations);
  });
}

// Let the next refresh of everything be now, in place of a turn of the clock.
let wake = () => {};
const pause = (ms) => new Promise((resume) => {
  const timer = setTimeout(() => resume(false), ms);
  wake = () => { clearTimeout(timer); resume(true); };
});

async function main() {
  takeToken();
  const wanted = readAddress();
  const runs = await attempt("runs", () => source.get("runs"));
  const names = (runs ?? []).map((one) => one.run);
  $("#tab-runs").hidden = names.length === 1;
  const run = names.includes(wanted.run) ? wanted.run : names.length === 1 ? names[0] : null;
  state.beside = state.beside.filter((name) => names.includes(name) && name !== run);
  if (run) openRun(run);
  showTab(!run ? "runs" : state.tab === "runs" && names.length === 1 ? "charts" : state.tab); // one run needs no list
  for (let count = 0, isWoken = true; ; count++) {
    const began = performance.now();
    if (source === saved ? isWoken : !document.hidden) await refresh(isWoken || count % SLOW_POLLS === 0);
    const tookMs = performance.now() - began;
    if (wanted.row !== null && state.rows.count) {
      if (wanted.row < state.rows.count) { list.selected = wanted.row; list.show(); openRow(wanted.row); }
      wanted.row = null;
    }
    isWoken = await pause(Math.max(POLL_MS, IDLE_SHARE * tookMs)); // a large run leaves its node in peace
  }
}

main();
