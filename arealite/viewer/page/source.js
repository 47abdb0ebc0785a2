"use strict";
// Where the page's data come from: the server that sent it. The token arrives behind the "#" of the address, which is sent
// to nobody; it is kept for this tab alone, and shown in a header.
const TOKEN = "arealite-token";

function takeToken() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (!words.has("token")) return;
  sessionStorage.setItem(TOKEN, words.get("token"));
  words.delete("token");
  history.replaceState(null, "", `#${words}`);
}

class SourceError extends Error {} // what the page says
class StaleError extends SourceError {} // the run removed rows

// A page that was saved has its data inside, and asks nobody: the rows of one run, none of which will change.
const inside = document.getElementById("data") && JSON.parse(document.getElementById("data").textContent);
const asList = (words) => String(words).split(",").map(Number);

const saved = {
  async get(path, parameters = {}, headers = {}) {
    switch (path) {
      case "runs": return inside.runs;
      case "run": return headers["If-None-Match"] ? null : { ...inside.run, tag: "saved" };
      case "evaluations": return { evaluations: inside.evaluations };
      case "rows": return parameters.start ? { ...inside.rows, start: parameters.start, count: 0, names: [] } : inside.rows;
      case "row": return inside.row[parameters.row];
      case "snippets": return asList(parameters.rows).map((n) => inside.snippets[n]);
      case "untrained": return [];
      case "search": {
        const text = parameters.text.toLowerCase();
        const rows = inside.row.flatMap(({ segments }, n) => ((segments ?? []).some((part) => Object.values(part).some((one) => one.toLowerCase().includes(text))) ? [n] : []));
        return { rows, end: parameters.start };
      }
    }
  },
};

const live = {
  async fetch(path, parameters, options) {
    const headers = { Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}`, ...options.headers };
    const response = await fetch(`api/${path}?${new URLSearchParams(parameters)}`, { cache: "no-store", ...options, headers })
      .catch(() => { throw new SourceError("The viewer does not answer. Is `arealite view` still running?"); });
    const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
    const value = isJson ? await response.json() : null;
    if (value?.stale) throw new StaleError(value.stale);
    if (value?.error || response.status >= 400) throw new SourceError(value?.error ?? `The viewer failed with status ${response.status}: its terminal says why.`);
    return [response, value];
  },

  async get(path, parameters = {}, headers = {}) {
    const [response, value] = await this.fetch(path, parameters, { headers });
    return value?.constructor === Object ? Object.assign(value, { tag: response.headers.get("ETag") }) : value;
  },

  // Ask for a page about some rows, as a file to save.
  async page(parameters, numbers) {
    const [response] = await this.fetch("export", parameters, { method: "POST", body: numbers.join(",") });
    return response.blob();
  },
};

const source = inside ? saved : live;
