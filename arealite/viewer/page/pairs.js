"use strict";
// Prompts that two parts of runs have in common, with both rewards: of two steps, two evaluations or two runs.
const DIFFERENCES_AT_ONCE = 100;
const EVERY_STEP = "step_*";

const partTitle = (part) => (part === EVERY_STEP ? "every step" : part.replace("eval_step_", "evaluation at step ").replace("step_", "step "));
const isTrainedPart = (part) => part.startsWith("step_");

function partsOf(rows) {
  const names = [...new Set(rows.columns.name)];
  return names.some(isTrainedPart) ? [...names, EVERY_STEP] : names;
}

// The mean reward of each prompt of a part over its samples, and its first row, by the prompt's place in the data set.
function rewardsOf(rows, part) {
  const { name, prompt_id: prompt, reward, branch } = rows.columns;
  const found = new Map();
  for (let n = 0; n < rows.count; n++) {
    const isIn = name[n] === part || (part === EVERY_STEP && isTrainedPart(name[n]));
    if (!isIn || branch[n] > 0 || reward[n] === null) continue;
    const index = indexOf(prompt[n]);
    if (!found.has(index)) found.set(index, { n, sum: 0, count: 0 });
    const one = found.get(index);
    one.sum += reward[n];
    one.count += 1;
  }
  return found;
}

function differences(before, after) {
  return [...before].filter(([index]) => after.has(index)).map(([index, one]) => {
    const other = after.get(index);
    const rewards = [one, other].map(({ sum, count }) => sum / count);
    return { index, rows: [one.n, other.n], rewards, difference: rewards[1] - rewards[0] };
  });
}

const [beforeSelect, afterSelect] = document.querySelectorAll("#pairs select");
const pairing = { sign: -1, numShown: DIFFERENCES_AT_ONCE, offers: [] };

// Offer parts of runs, keep what is chosen if it is still there, and else choose the last.
function offerParts(select, offers, isWanted, preferred) {
  const chosen = select.value;
  select.replaceChildren(...offers.map(([run, rows]) => {
    const group = element("optgroup", "", undefined, partsOf(rows).filter(isWanted).map((part) => {
      const option = element("option", "", offers.length > 1 ? `${run}: ${partTitle(part)}` : partTitle(part));
      option.value = JSON.stringify([run, part]);
      return option;
    }));
    group.label = run === "." ? "this run" : run;
    return group;
  }));
  const values = [...select.options].map((option) => option.value);
  select.value = [chosen, preferred].find((value) => values.includes(value)) ?? values.filter((value) => JSON.parse(value)[1] !== EVERY_STEP).at(-1) ?? "";
}

async function refreshPairs() {
  if (!$("#pairs").open || !state.run) return;
  const { run, rows } = state;
  const offers = [[run, rows], ...(await rowsBeside())];
  if (rows !== state.rows) return;
  pairing.offers = offers;
  offerParts(beforeSelect, offers.slice(0, 1), () => true, JSON.stringify([run, partsOf(rows)[0]]));
  const part = beforeSelect.value ? JSON.parse(beforeSelect.value)[1] : "";
  offerParts(afterSelect, offers, (other) => isTrainedPart(other) === isTrainedPart(part), offers.length > 1 ? JSON.stringify([offers[1][0], part]) : "");
  showDifferences();
}

function showDifferences() {
  const sides = [beforeSelect, afterSelect].map((select) => (select.value ? JSON.parse(select.value) : null));
  const parts = sides.map((side) => (side ? rewardsOf(pairing.offers.find(([run]) => run === side[0])[1], side[1]) : new Map()));
  const found = differences(...parts).sort((a, b) => pairing.sign * (a.difference - b.difference) || a.rows[0] - b.rows[0]);
  const count = (sign) => found.filter(({ difference }) => Math.sign(difference) === sign).length.toLocaleString();
  const mean = (side) => number(found.reduce((sum, { rewards }) => sum + rewards[side], 0) / found.length);
  $("#pairs .note").textContent = found.length
    ? `${found.length.toLocaleString()} prompts are in both: mean reward ${mean(0)}, then ${mean(1)}; ${count(1)} higher, ${count(0)} equal, ${count(-1)} lower.`
    : "No prompt with a reward is in both. Steps of one epoch share none; evaluations, epochs and other runs (tick them under Runs) do.";
  $("#pairs .table").hidden = !found.length;
  $("#pairs tbody").replaceChildren(...found.slice(0, pairing.numShown).map(({ index, rows, rewards, difference }) => {
    const open = element("button", "link", index);
    open.type = "button";
    open.addEventListener("click", () => { state.compareWith = { of: rows[0], row: [sides[1][0], rows[1]] }; choose(rows[0]); });
    const numbers = [...rewards.map((reward) => number(reward)), `${difference > 0 ? "+" : ""}${number(difference)}`];
    return element("tr", "", undefined, [element("td", "", undefined, [open]), ...numbers.map((text) => element("td", "", text))]);
  }));
  $("#pairs .more").hidden = found.length <= pairing.numShown;
}

$("#pairs").addEventListener("toggle", () => attempt("pairs", refreshPairs));
for (const select of [beforeSelect, afterSelect]) {
  select.addEventListener("change", () => { pairing.numShown = DIFFERENCES_AT_ONCE; attempt("pairs", refreshPairs); });
}
$("#pairs .order").addEventListener("click", () => { pairing.sign = -pairing.sign; showDifferences(); });
$("#pairs .more").addEventListener("click", () => { pairing.numShown += DIFFERENCES_AT_ONCE; showDifferences(); });
