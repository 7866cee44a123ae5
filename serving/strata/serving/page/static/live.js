// State of the platform, every two seconds while the page is visible: replicas, load and queue, tokens/s and TTFT.

import { byId, element } from "./elements.js";

const EVERY_MS = 2000;
const POINTS = 60;
const LEAST_S = 0.5; // a rate over less, as after a new key, is chance

export class Live {
  #endpoint;
  #changed;
  #last = null; // totals of the previous look, with their time
  #lines = { rate: [], ttft: [] };

  constructor(endpoint, changed) {
    this.#endpoint = endpoint;
    this.#changed = changed;
  }

  run() {
    const again = async () => {
      if (!document.hidden) await this.look();
      setTimeout(again, EVERY_MS);
    };
    document.addEventListener("visibilitychange", () => {
      this.#last = null; // a rate over the time in the background would be no rate of now
    });
    return again();
  }

  async look() {
    let state;
    try {
      state = await this.#endpoint.json("-/state");
    } catch (error) {
      byId("live").textContent = error.message;
      this.#last = null;
      this.#changed(null, error);
      return;
    }
    this.#show(state, performance.now());
    this.#changed(state, null);
  }

  #show(state, now) {
    const { totals, replicas, gateways } = state;
    const healthy = replicas.filter((replica) => replica.healthy).length;
    byId("live").textContent =
      `${healthy} of ${replicas.length} replicas healthy, ${gateways} gateway${gateways === 1 ? "" : "s"}, ` +
      `${totals.in_flight} requests in progress, ${totals.queued} waiting for a replica.`;
    byId("replicas").replaceChildren(...replicas.map(row));
    byId("rate-name").textContent = state.kind === "pictures" ? "Pictures/s" : "Tokens/s";
    byId("ttft-figure").hidden = state.kind === "pictures";
    const last = this.#last;
    this.#last = { totals, now };
    const seconds = last === null ? 0 : (now - last.now) / 1000;
    if (seconds < LEAST_S) return;
    const change = (name) => Math.max(0, totals[name] - last.totals[name]);
    const rate = change("produced") / seconds;
    const begun = change("first_tokens");
    const ttft = begun ? change("first_token_seconds") / begun : null;
    this.#line("rate", rate, rate.toFixed(rate < 10 ? 1 : 0));
    if (ttft !== null) this.#line("ttft", ttft, `${(ttft * 1000).toFixed(0)} ms`);
  }

  #line(name, value, text) {
    const points = this.#lines[name];
    points.push(value);
    if (points.length > POINTS) points.shift();
    byId(name).textContent = text;
    byId(`${name}-line`).firstElementChild.setAttribute("points", polyline(points));
  }
}

// Points of a line in a box of 120 by 32, the newest at the right, zero at the bottom.
export function polyline(values) {
  const most = Math.max(...values, 1e-9);
  const step = 120 / (POINTS - 1);
  const start = 120 - step * (values.length - 1);
  return values.map((value, at) => `${(start + at * step).toFixed(1)},${(30 - (28 * value) / most).toFixed(1)}`).join(" ");
}

function row({ name, role, healthy, calls, running, waiting, queued_tokens: tokens, kv_usage: usage }) {
  const queue = [waiting, tokens ? `${tokens} tokens` : undefined].filter((each) => each !== undefined).join(", ");
  const cells = [
    healthy ? name : `${name} (down)`,
    role,
    calls,
    running ?? "–",
    queue || "–",
    usage === undefined ? "–" : `${(usage * 100).toFixed(0)}%`,
  ];
  return element("tr", {}, cells.map((text, at) => element(at ? "td" : "th", at ? { text } : { text, scope: "row" })));
}
