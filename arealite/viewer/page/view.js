"use strict";
// The page: which run is open, what of it is shown, and the same requests again while it trains.
const POLL_MS = 2000;
const SLOW_POLLS = 5; // the list of runs and the ledger are asked for at every fifth
const TABS = ["runs", "charts", "rows"];
const quiet = source === saved ? "A saved page, with some of the run's trajectories: `arealite view` shows all." : "";

const state = { run: null, beside: [], tab: "runs", described: new Map(), rows: new Rows(), others: new Map(), snippets: new Map(), hits: null, search: 0, row: null, problem: "" };
const filters = $("#filters");
const list = new VirtualList($("#rows .scroll"), { draw: drawLine, open: openRow });

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

function fail(error) {
  const text = error?.message ?? state.problem;
  $("#error").hidden = !text;
  $("#error").textContent = text;
}

async function attempt(work) {
  try {
    const value = await work();
    fail(null);
    return value;
  } catch (error) {
    if (error instanceof StaleError) return resetRows();
    if (!(error instanceof SourceError)) throw error;
    fail(error);
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
      attempt(refreshCharts);
    });
    const line = element("tr", one.run === state.run ? "open" : "", undefined, [
      element("td", "", undefined, [open]), element("td", "", undefined, [beside]), element("td", "", String(one.steps)),
      element("td", "", one.reward == null ? "" : shown(one.reward)), element("td", "state", one.state), element("td", "", ago(one.changed_unix_s)),
    ]);
    return line;
  }));
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  return runs;
}

function openRun(run) {
  if (run === state.run) return;
  Object.assign(state, { run, row: null, beside: state.beside.filter((one) => one !== run) });
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
  $("#charts .lead").textContent = [main.lead, ...all.slice(1).map((one) => `beside it, dotted: ${one.title}`)].join("; ");
  $("#charts .config pre").textContent = main.config;
  $("#charts .config").hidden = !main.config;
  $("#charts .cards").replaceChildren(...main.cards.map(([label, value, note]) =>
    element("div", "card", undefined, [element("dt", "", label), element("dd", "", value), element("p", "", note)])));
  $("#evaluation").hidden = !main.table.length;
  if (main.table.length) $("#evaluation").replaceChildren(...tableOf(main.table[0], main.table.slice(1)).children);
  const charts = besideEachOther(all);
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

// The charts of the first run, with the curves of others dotted in them; bars are the first run's alone.
function besideEachOther(all) {
  const [main, ...others] = all;
  if (!others.length) return main.charts;
  const titles = [...new Set(all.flatMap((one) => one.charts.map((chart) => chart.title)))];
  return titles.map((title) => {
    const chart = main.charts.find((one) => one.title === title) ?? { ...others.flatMap((one) => one.charts).find((one) => one.title === title), traces: [] };
    const dotted = others.flatMap((one) => (one.charts.find((other) => other.title === title)?.traces ?? []).filter((trace) => trace.type === "scatter")
      .map((trace) => ({ ...trace, name: `${one.title}: ${trace.name}`, line: { ...trace.line, dash: "dot" } })));
    return { ...chart, traces: [...chart.traces, ...dotted] };
  });
}

// Trajectories

function resetRows() {
  Object.assign(state, { problem: "", rows: new Rows(), hits: filters.elements.text.value.trim() ? new Set() : null, row: null });
  state.snippets.clear();
  state.search += 1;
  $("#row").hidden = true;
  list.selected = null;
  list.set([]);
}

// Read what is new of a run, while `isWanted`; tell `onPart` where it begins. Raises StaleError.
async function readRows(run, rows, isWanted, onPart) {
  for (let isComplete = false; !isComplete; ) {
    const start = rows.count;
    const part = await source.get("rows", { run, generation: rows.generation, start });
    if (!isWanted()) return;
    if (rows.generation >= 0 && part.generation !== rows.generation) throw new StaleError("The run removed steps.");
    isComplete = part.is_complete;
    if (rows.take(part)) onPart(start);
    $("#status").textContent = isComplete ? quiet : `reading trajectories of ${run}: ${rows.count.toLocaleString()} so far`;
    if (rows === state.rows) state.problem = part.problems.join("\n");
  }
}

async function refreshRows() {
  if (!state.run) return;
  const { run, rows } = state;
  await readRows(run, rows, () => rows === state.rows, (start) => {
    refreshOutcomes();
    if (state.hits) searchMore(start, rows.count);
    refilter();
  });
}

// Return the runs beside with their rows, read when a trajectory is first compared with theirs.
async function rowsBeside() {
  for (const run of state.beside) {
    if (!state.others.has(run)) state.others.set(run, new Rows());
    try {
      await readRows(run, state.others.get(run), () => true, () => {});
    } catch (error) {
      state.others.delete(run);
      if (!(error instanceof StaleError)) throw error; // one that resumes is there next time
    }
  }
  return state.beside.filter((run) => state.others.has(run)).map((run) => [run, state.others.get(run)]);
}

async function refreshUntrained() {
  if (!state.run) return;
  const { run, rows } = state;
  const prompts = await source.get("untrained", { run });
  const untrained = new Map(prompts.map((prompt) => [-prompt.ticket, prompt]));
  const isSame = untrained.size === rows.untrained.size && prompts.every((prompt) => rows.untrained.get(-prompt.ticket)?.outcome === prompt.outcome);
  if (rows !== state.rows || isSame) return;
  rows.untrained = untrained;
  refreshOutcomes();
  refilter();
}

function refreshOutcomes() {
  const { rows } = state;
  const names = new Set([...new Set(rows.columns.name)].map((name) => rows.outcome(rows.columns.name.indexOf(name))));
  for (const n of rows.untrained.keys()) names.add(rows.outcome(n));
  const select = filters.elements.outcome;
  const wanted = ["", ...[...names].sort()];
  if (wanted.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((name) => { const option = element("option", "", name || "all"); option.value = name; return option; }));
  select.value = wanted.includes(chosen) ? chosen : "";
}

function refilter() {
  const values = Object.fromEntries([...new FormData(filters)].filter(([, value]) => value !== "")
    .map(([name, value]) => [name, /-(from|to)$/.test(name) ? Number(value) : value]));
  const began = performance.now();
  const numbers = select(state.rows, values, state.hits);
  list.set(numbers);
  state.filteredMs = performance.now() - began;
  const all = state.rows.count + state.rows.untrained.size;
  $("#counts").textContent = `${numbers.length.toLocaleString()} of ${all.toLocaleString()}`;
}

// Ask the server which rows hold the text, in slices, and show what is found so far.
async function searchText() {
  const text = filters.elements.text.value.trim();
  state.search += 1;
  state.hits = text ? new Set() : null;
  refilter();
  if (text) await searchMore(0, state.rows.count);
}

async function searchMore(start, end) {
  const { run, search, rows, hits } = state;
  const text = filters.elements.text.value.trim();
  while (end > start) {
    const part = await attempt(() => source.get("search", { run, generation: rows.generation, text, start, end }));
    if (!part || search !== state.search) return;
    for (const n of part.rows) hits.add(n);
    end = part.end;
    $("#status").textContent = end > start ? `searching: ${(end - start).toLocaleString()} rows left` : quiet;
    refilter();
  }
}

function drawLine(n) {
  const { rows, snippets } = state;
  const cell = (key) => { const value = rows.value(key, n); return value == null || (key === "staleness" && value < 0) ? "" : shown(value); };
  const text = n >= 0 ? (snippets.get(n) ?? "") : rows.outcome(n);
  return element("div", `line ${n >= 0 ? "" : /^(failed|rejected)/.test(text) ? "dropped" : "open"}`, undefined, [
    element("span", "", n >= 0 && rows.outcome(n) === "evaluated" ? `eval ${cell("step")}` : cell("step")), element("span", "", cell("prompt_id")), element("span", "", rows.place(n)),
    element("span", "", cell("reward")), element("span", "", cell("staleness")), element("span", "", cell("sampled")), element("span", "snippet", text),
  ]);
}

let snippetTimer = null;
list.onShown = (visible) => {
  clearTimeout(snippetTimer);
  const wanted = visible.filter((n) => n >= 0 && !state.snippets.has(n));
  if (!wanted.length) return;
  snippetTimer = setTimeout(() => attempt(async () => {
    const { run, rows } = state;
    const texts = await source.get("snippets", { run, generation: rows.generation, rows: wanted.join(",") });
    if (rows !== state.rows) return;
    wanted.forEach((n, i) => state.snippets.set(n, texts[i]));
    list.show();
  }), 60);
};

function openRow(n) {
  state.row = n;
  writeAddress();
  attempt(() => showRow(n));
}

async function showRow(n) {
  const { run, rows } = state;
  const prompt = rows.value("prompt_id", n);
  const row = n >= 0 ? await source.get("row", { run, generation: rows.generation, row: n }) : { prompt: await source.get("prompt", { run, prompt }) };
  if (state.row !== n || rows !== state.rows) return;
  const heading = element("h2", "", n >= 0 ? `Prompt ${prompt}, sample ${rows.place(n)}` : `Prompt ${prompt}: ${rows.outcome(n)}`);
  heading.tabIndex = -1;
  const close = element("button", "close", "Close");
  close.type = "button";
  close.addEventListener("click", closeRow);
  const body = n < 0 ? [element("p", "note", "No update has trained on this prompt, so no trajectory is stored.")] : [
    facts([
      ["Reward", row.facts.reward], ["Trained at step", row.facts.trained_step], ["Staleness", rows.value("staleness", n) < 0 ? null : rows.value("staleness", n)],
      ["Sampled tokens", rows.value("sampled", n)], ["Tokens", rows.value("tokens", n)], ["Attempt", row.facts.attempt], ["Server", row.facts.server], ["Truncated", row.facts.no_eos],
      ...Object.entries(row.facts).filter(([key]) => !OF_HEAD.has(key)).sort(),
    ]),
    group(n),
    ...bodyOf(row),
  ];
  const ledger = [element("h3", "", "In the ledger"), ledgerNodes(row.prompt)];
  $("#row").replaceChildren(element("div", "head", undefined, [heading, close]), ...body, ...ledger);
  $("#row").hidden = false;
  if (n < 0) return;
  const offers = [[run, rows], ...(await rowsBeside())];
  if (state.row !== n || rows !== state.rows) return;
  const fetchRow = (name, of, i) => attempt(() => source.get("row", { run: name, generation: of.generation, row: i }));
  ledger[0].before(...compareNodes(offers, n, row, fetchRow));
}
const OF_HEAD = new Set(["reward", "trained_step", "attempt", "server", "prompt_id", "sample", "row", "num_rows", "batch", "name", "no_eos"]);

// Links to the other samples of the prompt in the same step, and to the rows of this episode.
function group(n) {
  const { columns, count } = state.rows;
  const others = [];
  for (let i = Math.max(0, n - 4096); i < Math.min(count, n + 4096); i++) {
    if (columns.prompt_id[i] === columns.prompt_id[n] && columns.name[i] === columns.name[n]) others.push(i);
  }
  return element("div", "group", undefined, others.map((i) => {
    const button = element("button", "", `${state.rows.place(i)}: ${columns.reward[i] === null ? "" : shown(columns.reward[i])}`);
    button.type = "button";
    button.title = `Sample ${columns.sample[i]}, row ${columns.row[i]}: reward ${columns.reward[i]}`;
    button.ariaPressed = String(i === n);
    button.addEventListener("click", () => { list.selected = i; list.show(); openRow(i); });
    return button;
  }));
}

function closeRow() {
  state.row = null;
  $("#row").hidden = true;
  writeAddress();
  $("#rows .scroll").focus();
}

const MAX_EXPORTED = 2000;

async function exportRows() {
  const { run, rows } = state;
  const numbers = list.numbers.filter((n) => n >= 0).slice(0, MAX_EXPORTED);
  if (!numbers.length) throw new SourceError("An export must hold a trajectory: the list has none. Clear the filters.");
  const link = element("a");
  link.href = URL.createObjectURL(await source.page({ run, generation: rows.generation }, numbers));
  link.download = `${run === "." ? "run" : run.replaceAll("/", "-")}.html`;
  link.click();
  URL.revokeObjectURL(link.href);
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
  if (tab === "charts") { state.shownCharts = null; attempt(refreshCharts); }
  if (tab === "rows") list.show();
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
$("#export").addEventListener("click", () => attempt(exportRows));
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(() => attempt(searchText)));
let searchTimer = null;
filters.addEventListener("input", (event) => {
  if (event.target.name !== "text") return refilter();
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => attempt(searchText), 250);
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && !$("#row").hidden) return closeRow();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || state.tab !== "rows") return;
  if (event.key === "/") { event.preventDefault(); filters.elements.text.focus(); }
  if (event.key === "j") list.step(1);
  if (event.key === "k") list.step(-1);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.shownCharts = null; attempt(refreshCharts); });

async function refresh(isSlow) {
  if (isSlow) await refreshRuns();
  await refreshCharts();
  await refreshRows();
  if (isSlow && state.run) {
    const { run } = state;
    await refreshUntrained();
    const { evaluations } = await source.get("evaluations", { run });
    if (run === state.run) showEvaluations(evaluations);
  }
}

// Let the next refresh of everything be now, in place of a turn of the clock.
let wake = () => {};
const pause = () => new Promise((resume) => {
  const timer = setTimeout(() => resume(false), POLL_MS);
  wake = () => { clearTimeout(timer); resume(true); };
});

async function main() {
  takeToken();
  const wanted = readAddress();
  const runs = await attempt(() => source.get("runs"));
  const names = (runs ?? []).map((one) => one.run);
  $("#tab-runs").hidden = names.length === 1;
  const run = names.includes(wanted.run) ? wanted.run : names.length === 1 ? names[0] : null;
  state.beside = state.beside.filter((name) => names.includes(name) && name !== run);
  if (run) openRun(run);
  showTab(!run ? "runs" : state.tab === "runs" && names.length === 1 ? "charts" : state.tab); // one run needs no list
  for (let count = 0, isWoken = true; ; count++) {
    if (source === saved ? isWoken : !document.hidden) await attempt(() => refresh(isWoken || count % SLOW_POLLS === 0));
    if (wanted.row !== null && state.rows.count) {
      if (wanted.row < state.rows.count) { list.selected = wanted.row; list.show(); openRow(wanted.row); }
      wanted.row = null;
    }
    isWoken = await pause();
  }
}

main();
