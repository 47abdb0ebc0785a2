"use strict";
// The tab of trajectories: what is read of them, filtered, searched, opened and exported.
const filters = $("#filters");
const list = new VirtualList($("#rows .scroll"), { draw: drawLine, open: openRow });

function resetRows() {
  Object.assign(state, { rows: new Rows(), hits: filters.elements.text.value.trim() ? new Set() : null, row: null, compareWith: null });
  state.snippets.clear();
  state.search += 1;
  $("#row").hidden = true;
  $("#pairs").open = false;
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
    if (rows === state.rows) tell("files", part.problems.join("\n"));
  }
}

async function refreshRows() {
  if (!state.run) return;
  const { run, rows } = state;
  await readRows(run, rows, () => rows === state.rows, (start) => {
    attempt("pairs", refreshPairs);
    refreshOutcomes();
    if (state.hits) searchMore(start, rows.count);
    refilter();
  });
  if (rows === state.rows && !rows.count) refilter();
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
  $("#counts").textContent = all ? `${numbers.length.toLocaleString()} of ${all.toLocaleString()}` : "No trajectory is stored so far. Fine-tuning stores none.";
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
    const part = await attempt("search", () => source.get("search", { run, generation: rows.generation, text, start, end }));
    if (!part || search !== state.search) return;
    for (const n of part.rows) hits.add(n);
    end = part.end;
    $("#status").textContent = end > start ? `searching: ${(end - start).toLocaleString()} rows left` : quiet;
    refilter();
  }
}

// The step that trained a row or before which it was evaluated, or which part of an evaluation it is of.
function when(n) {
  const { rows } = state;
  const outcome = rows.outcome(n);
  return outcome === "trained" ? String(rows.value("step", n)) : outcome === "evaluated" ? `eval ${rows.value("step", n)}` : outcome;
}

function drawLine(n) {
  const { rows, snippets } = state;
  const cell = (key) => { const value = rows.value(key, n); return value == null || (key === "staleness" && value < 0) ? "" : shown(value); };
  const text = n >= 0 ? (snippets.get(n) ?? "") : rows.outcome(n);
  return element("div", `line ${n >= 0 ? "" : /^(failed|rejected)/.test(text) ? "dropped" : "open"}`, undefined, [
    element("span", "", n < 0 ? "" : when(n)), element("span", "", cell("prompt_id")), element("span", "", rows.place(n)),
    element("span", "", cell("reward")), element("span", "", cell("staleness")), element("span", "", cell("sampled")), element("span", "snippet", text),
  ]);
}

let snippetTimer = null;
list.onShown = (visible) => {
  clearTimeout(snippetTimer);
  const wanted = visible.filter((n) => n >= 0 && !state.snippets.has(n));
  if (!wanted.length) return;
  snippetTimer = setTimeout(() => attempt("first words", async () => {
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
  attempt("trajectory", () => showRow(n));
}

// What a prompt that is open in the ledger waits for.
function whyOpen(outcome) {
  if (!["issued", "running", "accepted"].includes(outcome)) return "";
  const what = state.runs.find((one) => one.run === state.run)?.state;
  if (what === "finished") return " The run is over and did not need it: episodes are started ahead of the last step.";
  return ["stopped", "ended early"].includes(what) ? " The run has ended; if it is resumed, the prompt is asked again." : "";
}

async function showRow(n) {
  const { run, rows } = state;
  const wanted = state.compareWith?.of === n ? state.compareWith.row : null;
  state.compareWith = null;
  const prompt = rows.value("prompt_id", n);
  const row = n >= 0 ? await source.get("row", { run, generation: rows.generation, row: n }) : { prompt: await source.get("prompt", { run, prompt }) };
  if (state.row !== n || rows !== state.rows) return;
  const heading = element("h2", "", n >= 0 ? `Prompt ${prompt}, sample ${rows.place(n)}` : `Prompt ${prompt}: ${rows.outcome(n)}`);
  heading.tabIndex = -1;
  const close = element("button", "close", "Close");
  close.type = "button";
  close.addEventListener("click", closeRow);
  const body = n < 0 ? [element("p", "note", `No update has trained on this prompt, so no trajectory is stored.${whyOpen(rows.outcome(n))}`)] : [
    facts([
      ["Reward", row.facts.reward], ["Trained at step", row.facts.trained_step], ["Staleness", rows.value("staleness", n) < 0 ? null : rows.value("staleness", n)],
      ["Sampled tokens", rows.value("sampled", n)], ["Tokens", rows.value("tokens", n)], ["Attempt", row.facts.attempt], ["Server", row.facts.server], ["Truncated", row.facts.no_eos],
      ...Object.entries(row.facts).filter(([key]) => !OF_HEAD.has(key)).sort(),
    ]),
    group(n),
    ...bodyOf(row),
  ];
  const problems = (row.problems ?? []).map((text) => element("p", "note wrong", text));
  const known = row.prompt.length || !problems.length ? [ledgerNodes(row.prompt)] : [];
  const ledger = [element("h3", "", "In the ledger"), ...problems, ...known];
  $("#row").replaceChildren(element("div", "head", undefined, [heading, close]), ...body, ...ledger);
  $("#row").hidden = false;
  if (n < 0) return;
  const isOpen = () => state.row === n && rows === state.rows;
  const fetchRow = (name, of, i) => attempt("other rows", () => source.get("row", { run: name, generation: of.generation, row: i }));
  const branches = await branchNodes(rows, rows.ofSample(n), n, (i) => (i === n ? row : fetchRow(run, rows, i)), choose);
  if (!isOpen()) return;
  ledger[0].before(...branches);
  const offers = [[run, rows], ...(await rowsBeside())];
  if (!isOpen()) return;
  ledger[0].before(...compareNodes(offers, n, row, fetchRow, wanted));
  if (wanted) $("#row .compare").scrollIntoView({ block: "nearest" });
}
const OF_HEAD = new Set(["reward", "trained_step", "attempt", "server", "prompt_id", "sample", "row", "num_rows", "batch", "name", "no_eos"]);

function choose(n) {
  list.selected = n;
  list.show();
  openRow(n);
}

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
    button.addEventListener("click", () => choose(i));
    return button;
  }));
}

function closeRow() {
  state.row = null;
  $("#row").hidden = true;
  tell("trajectory", "");
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
