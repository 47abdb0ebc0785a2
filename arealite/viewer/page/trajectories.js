"use strict";
// The list of trajectories: columns of all rows in memory, filters and order over them, and only the visible lines drawn.
const LINE_PX = 30;
const MARGIN_LINES = 8;
const MAX_PX = 8e6; // browsers cut elements that are higher
const KEYS = ["step", "reward", "staleness", "sampled", "tokens", "prompt_id", "row", "num_rows", "sample", "attempt", "truncated"];

// Rows by number; prompts that no step has trained have minus their tickets.
class Rows {
  constructor() { this.clear(-1); this.untrained = new Map(); }

  clear(generation) {
    this.generation = generation;
    this.count = 0;
    this.columns = Object.fromEntries([...KEYS, "name", "branch"].map((key) => [key, []]));
  }

  // Append what the server sent, and say whether it was anything.
  take(part) {
    if (part.generation !== this.generation) this.clear(part.generation);
    if (part.start !== this.count) return false;
    for (const key of KEYS) for (const value of part[key] ?? []) this.columns[key].push(value);
    for (const [name, count] of part.names) for (let i = 0; i < count; i++) this.columns.name.push(name);
    this.count += part.count;
    this.numberBranches();
    return part.count > 0;
  }

  // How many rows of the same sample stand before each row of an episode.
  numberBranches() {
    const { prompt_id: prompt, name, sample, branch } = this.columns;
    for (let n = branch.length; n < this.count; n++) {
      if (n === 0 || prompt[n] !== prompt[n - 1] || name[n] !== name[n - 1]) this.ofEpisode = new Map();
      branch.push(this.ofEpisode.get(sample[n]) ?? 0);
      this.ofEpisode.set(sample[n], branch[n] + 1);
    }
  }

  value(key, n) { return n >= 0 ? this.columns[key][n] : this.untrained.get(n)?.[key]; }

  // The rows of the same sample in the same episode, in turn: an agent's branches, or a long one's parts.
  ofSample(n) {
    const { prompt_id: prompt, name, sample } = this.columns;
    const isSame = (i) => prompt[i] === prompt[n] && name[i] === name[n];
    let start = n;
    while (start > 0 && isSame(start - 1)) start -= 1;
    const found = [];
    for (let i = start; i < this.count && isSame(i); i++) if (sample[i] === sample[n]) found.push(i);
    return found;
  }

  // The number of a row's sample and, if that has several rows, which of them it is.
  place(n) {
    const same = n >= 0 ? this.ofSample(n) : [];
    return same.length > 1 ? `${this.columns.sample[n]}.${same.indexOf(n)}` : String(this.value("sample", n) ?? "");
  }

  outcome(n) {
    if (n < 0) return this.untrained.get(n)?.outcome.replace("_", ": ") ?? "trained"; // meanwhile
    const name = this.columns.name[n];
    return name.startsWith("step_") ? "trained" : name.startsWith("eval_step_") ? "evaluated" : name;
  }
}

// Numbers of the rows that pass the filters, in order. `hits` are those that hold the text, if one is searched for.
function select(rows, filters, hits) {
  const ranges = ["step", "reward", "staleness", "sampled"].map((key) => [key, filters[`${key}-from`] ?? -Infinity, filters[`${key}-to`] ?? Infinity])
    .filter(([, from, to]) => from > -Infinity || to < Infinity);
  const { outcome, prompt, truncated, branch, order } = filters;
  const passes = (n) => {
    if (hits && !hits.has(n)) return false;
    if (truncated && rows.value("truncated", n) !== (truncated === "yes")) return false;
    if (branch && (rows.value("branch", n) > 0) !== (branch === "later")) return false;
    if (outcome && rows.outcome(n) !== outcome) return false;
    if (prompt && rows.value("prompt_id", n) !== prompt && !rows.value("prompt_id", n).startsWith(`${prompt}-`)) return false;
    return ranges.every(([key, from, to]) => { const value = rows.value(key, n); return value != null && value >= from && value <= to; });
  };
  const found = [];
  for (const n of rows.untrained.keys()) if (passes(n)) found.push(n);
  for (let n = 0; n < rows.count; n++) if (passes(n)) found.push(n);
  return sorted(rows, found, order);
}

function sorted(rows, found, order) {
  const [key, direction] = order.split("-");
  if (key === "prompt") {
    const keys = new Map(found.map((n) => [n, rows.value("prompt_id", n).split("-").map(Number)]));
    const compare = (a, b) => a[0] - b[0] || a[1] - b[1];
    return found.sort((a, b) => compare(keys.get(a), keys.get(b)) || a - b);
  }
  const sign = direction === "down" ? -1 : 1;
  const keys = new Float64Array(found.length);
  found.forEach((n, i) => { keys[i] = sign * (rows.value(key, n) ?? sign * Infinity); }); // what has no value comes last
  const places = Uint32Array.from(found, (_, i) => i);
  places.sort((a, b) => keys[a] - keys[b] || a - b);
  return Array.from(places, (i) => found[i]);
}

class VirtualList {
  constructor(scroll, { draw, open }) {
    Object.assign(this, { scroll, lines: scroll.firstElementChild, draw, open, numbers: [], selected: null });
    scroll.addEventListener("scroll", () => this.show());
    scroll.addEventListener("keydown", (event) => this.move(event));
    scroll.addEventListener("click", (event) => {
      const line = event.target.closest("[data-place]");
      if (line) this.choose(Number(line.dataset.place));
    });
    new ResizeObserver(() => this.show()).observe(scroll);
  }

  set(numbers) {
    this.numbers = numbers;
    this.lines.style.height = `${Math.min(MAX_PX, numbers.length * LINE_PX)}px`;
    this.show();
  }

  // Above MAX_PX a pixel of the scrollbar stands for more than one of the list.
  get scale() { return Math.max(1, (this.numbers.length * LINE_PX) / MAX_PX); }

  show() {
    const first = Math.max(0, Math.floor((this.scroll.scrollTop * this.scale) / LINE_PX) - MARGIN_LINES);
    const count = Math.ceil(this.scroll.clientHeight / LINE_PX) + 2 * MARGIN_LINES;
    const visible = this.numbers.slice(first, first + count);
    const top = this.scale === 1 ? first * LINE_PX : this.scroll.scrollTop - Math.min(first, MARGIN_LINES) * LINE_PX;
    this.lines.replaceChildren(...visible.map((n, i) => {
      const line = this.draw(n);
      line.id = `line-${n}`;
      line.role = "option";
      line.dataset.place = first + i;
      line.ariaSelected = String(n === this.selected);
      line.style.transform = `translateY(${top + i * LINE_PX}px)`;
      return line;
    }));
    this.visible = visible;
    this.onShown?.(visible);
  }

  choose(place) {
    if (!this.numbers.length) return;
    place = Math.min(Math.max(place, 0), this.numbers.length - 1);
    this.selected = this.numbers[place];
    const y = (place * LINE_PX) / this.scale;
    const { scrollTop, clientHeight } = this.scroll;
    if (y < scrollTop || y + LINE_PX > scrollTop + clientHeight) this.scroll.scrollTop = Math.max(0, y - clientHeight / 2);
    this.show();
    this.scroll.setAttribute("aria-activedescendant", `line-${this.selected}`);
    this.open(this.selected);
  }

  step(by) { this.choose(Math.max(-1, this.numbers.indexOf(this.selected)) + by); }

  move(event) {
    const page = Math.floor(this.scroll.clientHeight / LINE_PX);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const by = steps[event.key];
    Number.isFinite(by) ? this.step(by) : this.choose(by < 0 ? 0 : this.numbers.length - 1);
  }
}
