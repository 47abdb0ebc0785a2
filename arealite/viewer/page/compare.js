"use strict";
// Two completions of one prompt beside each other: of two steps, two samples, or two runs.
const MAX_OFFERED = 200; // the newest; each costs time whenever a trajectory is opened

const isTrained = (rows, n) => rows.columns.name[n].startsWith("step_");
const indexOf = (promptId) => promptId.replace(/^-?\d+-/, ""); // a prompt that is named in another way is only itself

// Numbers of the rows about the same row of the data set, the newest first; prompts of training and of evaluations are of two.
function aboutTheSame(rows, promptId, wantsTrained) {
  const end = indexOf(promptId);
  const found = [];
  for (let i = rows.count - 1; i >= 0 && found.length < MAX_OFFERED; i--) {
    const other = rows.columns.prompt_id[i];
    if (other.endsWith(end) && indexOf(other) === end && isTrained(rows, i) === wantsTrained) found.push(i);
  }
  return found;
}

const labelOf = (rows, n) => {
  const { name, prompt_id: prompt, reward } = rows.columns;
  return `${name[n].replace("_step_", " ").replace("_", " ")}, prompt ${prompt[n]}, sample ${rows.place(n)}: reward ${reward[n] === null ? "unknown" : shown(reward[n])}`;
};

// `offers` are pairs of a run's name and its rows, the open run first; `wanted` is the run and row to begin with, if any.
function compareNodes(offers, n, row, fetchRow, wanted) {
  const [[, rows]] = offers;
  const prompt = rows.columns.prompt_id[n];
  const nothing = element("option", "", "nothing");
  nothing.value = "";
  const picker = element("select", "", undefined, [nothing]);
  for (const [run, others] of offers) {
    const offered = aboutTheSame(others, prompt, isTrained(rows, n)).filter((i) => others !== rows || i !== n);
    const same = wanted?.[0] === run && !offered.includes(wanted[1]) ? [...offered, wanted[1]] : offered;
    const group = element("optgroup", "", undefined, same.map((i) => {
      const option = element("option", "", labelOf(others, i));
      option.value = JSON.stringify([run, i]);
      return option;
    }));
    group.label = run;
    if (same.length) picker.append(group);
  }
  const sides = element("div", "sides");
  picker.addEventListener("change", async () => {
    if (!picker.value) return sides.replaceChildren();
    const chosen = picker.value;
    const [run, i] = JSON.parse(chosen);
    const others = offers.find(([name]) => name === run)[1];
    const other = await fetchRow(run, others, i);
    if (!other || picker.value !== chosen) return;
    sides.replaceChildren(...[[offers[0][0], rows, n, row], [run, others, i, other]].map(([name, of, number, one]) => element("div", "", undefined, [
      element("h4", "", `${offers.length > 1 ? `${name}: ` : ""}${labelOf(of, number)}`), conversation(one.segments),
    ])));
  });
  if (wanted) {
    picker.value = JSON.stringify(wanted);
    picker.dispatchEvent(new Event("change"));
  }
  return [element("label", "compare", "Compare with ", [picker]), sides];
}
