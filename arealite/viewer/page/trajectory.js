"use strict";
// One trajectory: as a conversation, as coloured tokens with their numbers, and what the ledger says of its prompt.
const TOKENS_AT_ONCE = 4000;
const CHARACTERS_AT_ONCE = 100000;
const VERSION_COLOURS = ["--blue", "--orange", "--green", "--purple", "--teal", "--red"];
const shownAs = { mode: "conversation", colour: "loss_mask" };

const facts = (entries) => element("dl", "facts", undefined, entries.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => element("div", "", undefined, [element("dt", "", name), element("dd", "", shown(value))])));

const shown = (value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(4)).toString() : String(value));

const STORED = ["input_ids", "loss_mask", "logprobs", "versions"];
const TITLES = { loss_mask: "sampled", logprobs: "logprob", versions: "version", input_ids: "id", advantages: "advantage", logprob_gap: "logprob gap" };
const titleOf = (key) => TITLES[key] ?? key;
// What is shown as the exponential of what is stored: around 1 in place of 0.
const RATIOS = { ratio: "log_ratio", "rollout importance weight": "logprob_gap" };

// What a token may be coloured by, the usual first.
function colourKeys(tokens) {
  const more = Object.keys(tokens).filter((key) => !STORED.includes(key) && key !== "log_ratio");
  const ratios = Object.keys(RATIOS).filter((key) => RATIOS[key] in tokens);
  return [...STORED.slice(1), ...["advantages"].filter((key) => more.includes(key)), ...ratios, ...more.filter((key) => key !== "advantages")];
}

// All numbers of a token in words.
function numbersOf(tokens, i) {
  const known = (value) => (value === null ? "unknown" : shown(value));
  const told = Object.entries(tokens).filter(([key]) => key !== "log_ratio")
    .map(([key, values]) => `${titleOf(key)} ${key === "loss_mask" ? Boolean(values[i]) : known(values[i])}`);
  if (!tokens.loss_mask[i]) return told;
  const ratios = Object.entries(RATIOS).filter(([, key]) => tokens[key]).map(([name, key]) => `${name} ${known(tokens[key][i] === null ? null : Math.exp(tokens[key][i]))}`);
  return [...told, `probability ${shown(Math.exp(tokens.logprobs[i]))}`, ...ratios];
}

// Return a function from a token's place to its colour, and the legend in words.
function colouring(tokens, key) {
  const values = tokens[RATIOS[key] ?? key];
  const sampled = (i) => Boolean(tokens.loss_mask[i]);
  if (key === "loss_mask") return [(i) => (sampled(i) ? tint("--blue", 0.35) : ""), [["--blue", "sampled"], ["", "given"]]];
  if (key === "versions") {
    const versions = [...new Set(values.filter((_, i) => sampled(i)))].sort((a, b) => a - b);
    const colourOf = new Map(versions.map((version, i) => [version, VERSION_COLOURS[i % VERSION_COLOURS.length]]));
    return [(i) => (sampled(i) ? tint(colourOf.get(values[i]), 0.4) : ""), versions.map((version) => [colourOf.get(version), `version ${version}`])];
  }
  if (key === "logprobs") {
    return [(i) => (sampled(i) ? tint("--red", Math.min(0.85, -values[i] / 5)) : ""), [["--red", "the redder, the less probable: full at a logprob of -4.25 and below"]]];
  }
  const most = values.reduce((most, value, i) => (sampled(i) ? Math.max(most, Math.abs(value)) : most), 0) || 1;
  const [middle, low, high] = key in RATIOS ? [1, Math.exp(-most), Math.exp(most)] : [0, -most, most];
  const legend = [["--red", `below ${middle}, to ${shown(low)}`], ["--green", `above ${middle}, to ${shown(high)}`]];
  return [(i) => (sampled(i) ? tint(values[i] < 0 ? "--red" : "--green", (0.8 * Math.abs(values[i])) / most) : ""), legend];
}

const tint = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(100 * share)}%, transparent)`;

const visibleText = (text) => (text === "" ? "·" : text.replaceAll("\n", "⏎\n"));

function tokenNodes(row) {
  const { tokens, texts } = row;
  const keys = colourKeys(tokens);
  const colour = keys.includes(shownAs.colour) ? shownAs.colour : "loss_mask";
  const picker = element("select", "", undefined, keys.map((key) => { const option = element("option", "", titleOf(key)); option.value = key; return option; }));
  picker.value = colour;
  const [colourOf, legend] = colouring(tokens, colour);
  const keyNodes = legend.map(([name, text]) => {
    const swatch = element("i");
    if (name) swatch.style.background = tint(name, 0.4);
    return element("span", "", undefined, [swatch, text]);
  });
  const inspector = element("p", "inspector", "Point at a token, or move through them with the arrow keys.");
  inspector.role = "status";
  const body = element("div", `tokens${texts ? "" : " ids"}`);
  body.tabIndex = 0;
  body.ariaLabel = "Tokens";
  const add = (start) => {
    const end = Math.min(tokens.input_ids.length, start + TOKENS_AT_ONCE);
    for (let i = start; i < end; i++) {
      const node = element("span", tokens.loss_mask[i] ? "" : "given", texts ? visibleText(texts[i]) : `${tokens.input_ids[i]} `);
      node.style.background = colourOf(i);
      node.dataset.token = i;
      body.append(node);
    }
    if (end < tokens.input_ids.length) {
      const more = element("button", "", `Show more of ${tokens.input_ids.length} tokens`);
      more.type = "button";
      more.addEventListener("click", () => { more.remove(); add(end); });
      body.append(more);
    }
  };
  add(0);
  let current = null;
  const inspect = (node) => {
    current?.classList.remove("current");
    current = node;
    node.classList.add("current");
    const i = Number(node.dataset.token);
    inspector.textContent = [`token ${i}`, ...(texts ? [JSON.stringify(texts[i])] : []), ...numbersOf(tokens, i)].join("  ·  ");
  };
  body.addEventListener("mouseover", (event) => { if (event.target.dataset.token) inspect(event.target); });
  body.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const node = by && (current ? (by > 0 ? current.nextElementSibling : current.previousElementSibling) : body.firstElementChild);
    if (!node?.dataset.token) return;
    event.preventDefault();
    inspect(node);
    node.scrollIntoView({ block: "nearest" });
  });
  picker.addEventListener("change", () => {
    shownAs.colour = picker.value;
    const fresh = tokenNodes(row);
    holder.replaceWith(fresh);
    fresh.querySelector("select").focus();
  });
  const note = texts ? [] : [element("p", "note", "The run's tokenizer.json is not on this disk, so tokens are shown by their ids.")];
  const holder = element("div", "", undefined, [element("div", "legend", undefined, [element("label", "", "Colour ", [picker]), ...keyNodes]), inspector, ...note, body]);
  return holder;
}

// A text, of which a browser that lays out megabytes at once would be slow to show all.
function longText(text) {
  const node = element("pre", "", text.slice(0, CHARACTERS_AT_ONCE));
  if (text.length > CHARACTERS_AT_ONCE) {
    const more = element("button", "", `Show all ${text.length.toLocaleString()} characters`);
    more.type = "button";
    more.addEventListener("click", () => { node.textContent = text; });
    node.append("\n", more);
  }
  return node;
}

const conversation = (segments) => element("div", "conversation", undefined, (segments ?? []).flatMap((part) => Object.entries(part)).map(([kind, text]) =>
  element("div", `turn ${kind}`, undefined, [element("h4", "", kind === "sampled" ? "Sampled" : "Given"), longText(text)])));

const clock = (unix_s) => new Date(1000 * unix_s).toLocaleString();

function ledgerNodes(issues) {
  if (!issues.length) return element("p", "note", "Nothing: the ledger has the prompts of training, and none of evaluations.");
  return element("div", "ledger", undefined, issues.map((issue) => element("div", "", undefined, [
    facts([
      ["State", issue.reason ? `${issue.state}: ${issue.reason}` : issue.state], ["Attempt", issue.attempt], ["Head version", issue.head_version],
      ["Trained version", issue.trained_version], ["Latency, s", issue.latency_s], ["Issued", clock(issue.issued_unix_s)], ["Changed", clock(issue.changed_unix_s)],
      ["Failed attempts", issue.retries.join(", ")],
    ]),
    ...(issue.samples.length ? [tableOf(["Sample", "Tokens", "Latency, s", "Interrupts", "Server"], issue.samples.map((one) => [one.sample, one.tokens, one.latency_s, one.num_interrupts, one.server]))] : []),
  ])));
}

const tableOf = (heads, lines) => element("div", "table", undefined, [element("table", "", undefined, [
  element("tr", "", undefined, heads.map((head) => element("th", "", head))),
  ...lines.map((line) => element("tr", "", undefined, line.map((value) => element("td", "", value === null ? "" : shown(value))))),
])]);

function bodyOf(row) {
  if (!row.tokens && !row.segments) return [element("p", "note", "Tokens and texts of this row were not stored (rollout.stored_share).")];
  const modes = [["conversation", "Conversation"], ...(row.tokens ? [["tokens", "Tokens"]] : [])];
  const mode = modes.some(([name]) => name === shownAs.mode) ? shownAs.mode : "conversation";
  const holder = element("div", "", undefined, [mode === "tokens" ? tokenNodes(row) : conversation(row.segments)]);
  const buttons = modes.map(([name, title]) => {
    const button = element("button", "", title);
    button.type = "button";
    button.ariaPressed = String(name === mode);
    button.addEventListener("click", () => {
      shownAs.mode = name;
      holder.replaceChildren(name === "tokens" ? tokenNodes(row) : conversation(row.segments));
      for (const other of buttons) other.ariaPressed = String(other === button);
    });
    return button;
  });
  return [element("div", "modes", undefined, buttons), holder];
}
