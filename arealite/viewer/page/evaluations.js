"use strict";
// Before and after: the same held-out prompts.
let beforeAfter = null;

const CHANGES = {
  learned: "Wrong, then correct", kept: "Correct both times", lost: "Correct, then wrong", never: "Wrong both times",
  always: "Always solved", sometimes: "Sometimes solved", unsolved: "Never solved",
  better: "Higher reward", equal: "Equal reward", worse: "Lower reward",
};

function answer(when, segments, reward, other) {
  const isBinary = beforeAfter.is_binary;
  const difference = isBinary ? reward - 0.5 : reward === null || other === null ? 0 : reward - other;
  const verdict = element("b", "", isBinary ? (reward ? "correct" : "wrong") : `reward ${reward === null ? "unknown" : number(reward)}`);
  const title = element("h4", "", `${when}: `, [verdict]);
  return element("div", `answer ${["lower", "", "higher"][Math.sign(difference) + 1]}`, undefined, [title, conversation(segments)]);
}

const PAIRS_AT_ONCE = 5;
let numPairsShown = PAIRS_AT_ONCE;
let change = "all";

function showPairs() {
  const { pairs, first, last } = beforeAfter;
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

function showEvaluations(found) {
  $("#before-after").hidden = !found;
  if (!found || JSON.stringify(found) === JSON.stringify(beforeAfter)) return;
  beforeAfter = found;
  const { counts, num_pairs: numPairs, pairs, heading } = found;
  $("#before-after h2").textContent = heading ?? "Before and after";
  const cut = pairs.length < numPairs ? " The first of each kind can be read here; the counts are of all." : "";
  $("#before-after .note").textContent = `${numPairs} held-out prompts, in the order of the data set.${cut}`;
  $("#before-after .filters").replaceChildren(...[["all", numPairs], ...Object.entries(counts)].map(([kind, count]) => {
    const button = element("button", "", `${CHANGES[kind] ?? "All"} (${count})`);
    button.type = "button";
    button.dataset.change = kind;
    button.addEventListener("click", () => { change = kind; numPairsShown = PAIRS_AT_ONCE; showPairs(); });
    return button;
  }));
  showPairs();
}

$("#before-after .more").addEventListener("click", () => { numPairsShown += 2 * PAIRS_AT_ONCE; showPairs(); });
