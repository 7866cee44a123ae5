// Form for models of pictures: progress, partial pictures, and the finished ones.

import { announce, byId, element, options, pairs } from "./elements.js";
import { Refused } from "./endpoint.js";
import { readEvents } from "./events.js";
import { explanation, milliseconds } from "./facts.js";

const PARTIALS = 2;

export class Pictures {
  #endpoint;
  #abort = null;

  constructor(endpoint) {
    this.#endpoint = endpoint;
    byId("picture-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#abort) this.#draw();
    });
    byId("stop-drawing").addEventListener("click", () => this.#abort?.abort());
  }

  show(models) {
    options(byId("picture-model"), models);
  }

  async #draw() {
    const prompt = byId("prompt").value.trim();
    if (!prompt) {
      byId("prompt").focus();
      return;
    }
    const abort = (this.#abort = new AbortController());
    byId("draw").disabled = true;
    byId("stop-drawing").disabled = false;
    const shown = new Shown(prompt);
    byId("gallery").prepend(shown.element);
    announce("The pictures are being made.");
    let note = "";
    try {
      await this.#stream(shown, request(prompt), abort.signal);
      announce(`${shown.completed} picture${shown.completed === 1 ? "" : "s"} made.`);
    } catch (error) {
      if (error.name === "AbortError") note = "Stopped.";
      else note = error instanceof Refused ? error.message : "The connection was lost before the pictures were complete.";
      announce(note);
    }
    shown.end(note, abort.signal.aborted);
    this.#abort = null;
    byId("draw").disabled = false;
    byId("stop-drawing").disabled = true;
  }

  async #stream(shown, body, signal) {
    const response = await this.#endpoint.fetch("v1/images/generations", { body, signal, headers: { "x-strata-explain": "1" } });
    for await (const { data, comment, at } of readEvents(response.body)) {
      if (comment !== undefined) {
        const explained = explanation(comment);
        if (explained) shown.explained = explained;
        continue;
      }
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      shown.take(event, at);
    }
    if (shown.completed < body.n) throw new Refused("The connection was lost before the pictures were complete.");
  }
}

function request(prompt) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return {
    model: byId("picture-model").value,
    prompt,
    n: number("count") ?? 1,
    size: byId("size").value || "auto",
    steps: number("steps"),
    seed: number("seed"),
    stream: true,
    progress: true,
    partial_images: PARTIALS,
  };
}

class Shown {
  #began = performance.now();
  #progress = element("progress", { max: "1", value: "0", "aria-label": "Progress of the pictures" });
  #strip = element("div", { class: "strip" });
  #images = new Map();
  #steps = new Map(); // picture to its share of done steps
  #stepping = []; // times of the first picture's steps
  completed = 0;
  explained = null;
  seeds = [];

  constructor(prompt) {
    this.prompt = prompt;
    this.element = element("article", { class: "request", "aria-label": `Pictures of: ${prompt}` }, [
      element("p", { class: "text", text: prompt }),
      this.#progress,
      this.#strip,
    ]);
  }

  take(event, at) {
    const { index = 0 } = event;
    if (event.type === "image_generation.progress") {
      this.#steps.set(index, event.step / event.steps);
      if (index === 0) this.#stepping.push(at);
    } else if (event.b64_json) {
      const done = event.type === "image_generation.completed";
      this.#picture(index, event, done);
      if (done) {
        this.#steps.set(index, 1);
        this.completed += 1;
        this.seeds[index] = event.seed;
        this.done = at - this.#began;
      }
    }
    const shares = [...this.#steps.values()];
    this.#progress.value = shares.reduce((sum, share) => sum + share, 0) / Math.max(1, shares.length);
  }

  #picture(index, event, done) {
    const data = Uint8Array.from(atob(event.b64_json), (letter) => letter.charCodeAt(0));
    const url = URL.createObjectURL(new Blob([data], { type: `image/${event.output_format ?? "png"}` }));
    const image = this.#images.get(index) ?? element("img");
    if (!this.#images.has(index)) {
      this.#images.set(index, image);
      this.#strip.append(image);
    }
    const old = image.src;
    image.src = url;
    image.alt = `${this.prompt}, picture ${index + 1}${done ? "" : ", not finished"}`;
    if (old) URL.revokeObjectURL(old);
  }

  end(note, stopped) {
    this.#progress.remove();
    const gaps = this.#stepping.slice(1).map((at, before) => at - this.#stepping[before]);
    const replicas = this.explained?.replicas?.map(({ name }) => name) ?? [];
    const known = [
      ["Replica", replicas.join(", then ")],
      ["Time", this.done && milliseconds(this.done)],
      ["Step, mean", gaps.length && milliseconds(gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length)],
      ["Queue", this.explained?.queued_s && milliseconds(this.explained.queued_s * 1000)],
      ["Seed", this.seeds.filter((seed) => seed !== undefined).join(", ")],
    ].filter(([, value]) => value);
    if (known.length) this.element.append(pairs(known));
    if (note) this.element.append(element("p", { class: stopped ? "note" : "error", text: note }));
  }
}
