// A conversation with one model: its turns, the request of an answer, and the facts beside it.

import { Refused } from "./endpoint.js";
import { announce, element, options, pairs } from "./elements.js";
import { readEvents } from "./events.js";
import { Clock, explanation, facts } from "./facts.js";

const ANNOUNCED = 2000; // characters of an answer that are read out

export class Pane {
  #endpoint;
  #history = [];
  #turns = element("div", { class: "turns", tabindex: "0", role: "region" });
  #select = element("select");
  #abort = null;

  constructor(endpoint, number) {
    this.#endpoint = endpoint;
    const label = `Model ${number}`;
    this.#turns.setAttribute("aria-label", `Conversation with model ${number}`);
    this.element = element("section", { class: "pane", "aria-label": label }, [
      element("label", {}, [element("span", { text: label }), this.#select]),
      this.#turns,
    ]);
  }

  get model() {
    return this.#select.value;
  }

  get history() {
    return [...this.#history];
  }

  show(models) {
    options(this.#select, models);
  }

  choose(model) {
    this.#select.value = model;
  }

  // Starts from the conversation of another pane, so that both models get the same messages.
  continueFrom(history) {
    for (const { role, content, by } of history) this.#turn(role, content, by);
    this.#history = [...history];
  }

  clear() {
    this.stop();
    this.#history = [];
    this.#turns.replaceChildren();
  }

  stop() {
    this.#abort?.abort();
  }

  async send(message, { system, temperature, maxTokens }) {
    this.#turn("user", message);
    const asked = [...this.#history, { role: "user", content: message }];
    const turns = system ? [{ role: "system", content: system }, ...asked] : asked;
    const messages = turns.map(({ role, content }) => ({ role, content }));
    const model = this.model;
    const answer = this.#turn("assistant", "");
    const abort = new AbortController();
    this.#abort = abort;
    const options = { model: model || undefined, messages, temperature, max_tokens: maxTokens };
    announce(`${model} is answering.`);
    let failed = "";
    try {
      await this.#stream(answer, options, abort.signal);
    } catch (error) {
      if (error.name === "AbortError") failed = "Stopped.";
      else if (error instanceof Refused) failed = error.message;
      else failed = "The connection was lost before the answer was complete.";
    }
    if (this.#abort === abort) this.#abort = null;
    answer.text.classList.remove("waiting");
    if (failed) answer.turn.append(element("p", { class: abort.signal.aborted ? "note" : "error", text: failed }));
    const content = answer.text.textContent;
    if (!answer.turn.isConnected) return; // the conversation was cleared
    // A message without any answer is not repeated with the next one.
    if (content) this.#history = [...asked, { role: "assistant", content, by: model }];
    announce(`${model}: ${[content.slice(0, ANNOUNCED), failed].filter(Boolean).join(" ") || "no text."}`);
    this.#follow(true);
  }

  async #stream(answer, options, signal) {
    const clock = new Clock(performance.now());
    const found = { clock, headers: new Headers(), usage: null, explained: null };
    try {
      const response = await this.#endpoint.fetch("v1/chat/completions", {
        body: { ...options, stream: true, stream_options: { include_usage: true } },
        headers: { "x-strata-explain": "1" },
        signal,
      });
      found.headers = response.headers;
      answer.explain(found);
      await this.#read(answer, response.body, found);
    } finally {
      answer.explain(found);
    }
  }

  async #read(answer, body, found) {
    let complete = false;
    for await (const event of readEvents(body)) {
      if (event.comment !== undefined) {
        found.explained = explanation(event.comment) ?? found.explained;
        continue;
      }
      if (event.data === "[DONE]") {
        complete = true;
        continue;
      }
      const tree = JSON.parse(event.data);
      if (tree.error) throw new Refused(tree.error.message);
      found.usage = tree.usage ?? found.usage;
      const choice = tree.choices?.[0];
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
      if (thought) answer.think(thought);
      if (choice?.delta?.content) answer.add(choice.delta.content);
      if (thought || choice?.delta?.content) {
        const begins = found.clock.first === null;
        found.clock.tick(event.at);
        if (begins) answer.explain(found);
      }
      if (choice?.finish_reason === "length") answer.turn.append(element("p", { class: "note", text: "Ended at the limit of tokens." }));
      this.#follow();
    }
    if (!complete) throw new Refused("The connection was lost before the answer was complete.");
  }

  #turn(role, content, by = this.model) {
    const own = role === "user";
    const text = element("p", { class: own ? "text" : "text waiting", text: content });
    if (content) text.classList.remove("waiting");
    const turn = element("article", { class: `turn ${own ? "user" : "answer"}` }, [
      element("h3", { text: own ? "You" : by || "Answer" }),
      text,
    ]);
    this.#turns.append(turn);
    this.#follow(true);
    let shown = null;
    const thoughts = element("p", { class: "text reasoning" });
    return {
      turn,
      text,
      add: (part) => text.append(part),
      think: (part) => {
        if (!thoughts.isConnected) text.before(thoughts);
        thoughts.append(part);
      },
      explain: (found) => {
        const known = pairs(facts(found));
        shown?.remove();
        shown = known.children.length ? known : null;
        if (shown) text.after(shown);
      },
    };
  }

  // Scrolls with the answer, unless the reader has scrolled up.
  #follow(always = false) {
    const box = this.#turns;
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
  }
}
