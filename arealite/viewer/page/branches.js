"use strict";
// The rows of one sample as a tree: each begins with tokens of an earlier one, and goes its own way after them.
const MAX_BRANCHES = 64; // each is read for its tokens

function sharedTokens(one, other) {
  let count = 0;
  while (count < one.length && count < other.length && one[count] === other[count]) count++;
  return count;
}

// Return for each list of tokens its parent, the earlier one of which it shares most (null without any), and how many.
function treeOf(lists) {
  return lists.map((tokens, i) => lists.slice(0, i).reduce((best, earlier, parent) => {
    const shared = sharedTokens(tokens, earlier);
    return shared > best.shared ? { parent, shared } : best;
  }, { parent: null, shared: 0 }));
}

// The first words of what a row has beyond its first `shared` tokens, where the tokenizer is known: given ones in grey.
function ownWords({ texts, tokens }, shared) {
  const parts = [];
  for (let i = shared; texts && i < Math.min(texts.length, shared + 80); i++) {
    const kind = tokens.loss_mask[i] ? "sampled" : "given";
    if (parts.at(-1)?.[0] !== kind) parts.push([kind, ""]);
    parts.at(-1)[1] += texts[i];
  }
  return element("span", "snippet", undefined, parts.map(([kind, text]) => element("span", kind, text)));
}

// `numbers` are the rows of the sample, `n` the one that is open; `fetchRow` reads one and `open` shows it.
async function branchNodes(rows, numbers, n, fetchRow, open) {
  const read = await Promise.all(numbers.slice(0, MAX_BRANCHES).map(fetchRow));
  if (numbers.length < 2 || read.some((row) => !row?.tokens)) return []; // without tokens nobody knows
  const tree = treeOf(read.map((row) => row.tokens.input_ids));
  const lists = new Map();
  const listOf = (parent) => {
    if (!lists.has(parent)) lists.set(parent, element("ul", parent === null ? "branches" : ""));
    return lists.get(parent);
  };
  const items = read.map((row, i) => {
    const { parent, shared } = tree[i];
    const button = element("button", "", rows.place(numbers[i]));
    button.type = "button";
    button.ariaPressed = String(numbers[i] === n);
    button.addEventListener("click", () => open(numbers[i]));
    const own = row.tokens.input_ids.length - shared;
    const told = parent === null ? `${own} tokens` : `${own} tokens after ${shared} of ${rows.place(numbers[parent])}`;
    return element("li", "", undefined, [button, element("span", "", ` ${told} `), ownWords(row, shared)]);
  });
  items.forEach((item, i) => listOf(tree[i].parent).append(item));
  items.forEach((item, i) => { if (lists.has(i)) item.append(lists.get(i)); });
  const rest = numbers.length - read.length;
  return [element("h3", "", "Branches"), listOf(null), ...(rest ? [element("p", "note", `The first ${read.length} of ${numbers.length} rows.`)] : [])];
}
