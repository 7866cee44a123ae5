// Requests to the endpoint: the API key, and errors in words.

const STORED = "strata-api-key";
const ANSWER_MS = 10_000; // limit for answers that are not streamed

export class Refused extends Error {}

export class Endpoint {
  #key = "";

  constructor() {
    this.#key = localStorage.getItem(STORED) ?? "";
  }

  get stored() {
    return localStorage.getItem(STORED) !== null;
  }

  get key() {
    return this.#key;
  }

  // The key stays in the memory of this tab unless `remember` is set.
  use(key, remember) {
    this.#key = key.trim();
    if (remember && this.#key) localStorage.setItem(STORED, this.#key);
    else localStorage.removeItem(STORED);
  }

  // Paths are relative to the page, which may be behind a prefix.
  async fetch(path, { body, signal, headers = {} } = {}) {
    const sent = { ...headers };
    if (this.#key) sent.authorization = `Bearer ${this.#key}`;
    if (body) sent["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body ? "POST" : "GET",
        headers: sent,
        body: body && JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "same-origin",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The endpoint cannot be reached. Check that it runs, then try again.");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  async json(path) {
    return (await this.fetch(path, { signal: AbortSignal.timeout(ANSWER_MS) })).json();
  }
}

async function refusal(response) {
  let words = "";
  try {
    words = (await response.json()).error.message;
  } catch {
    words = "";
  }
  const wait = response.headers.get("retry-after");
  const named = {
    401: "The endpoint needs a valid API key. Enter it under Access.",
    429: words || "The endpoint is busy.",
  }[response.status];
  const text = named ?? (words || `The endpoint answered with status ${response.status}.`);
  const error = new Refused(wait && !text.includes(`${wait} s`) ? `${text} Try again in ${wait} s.` : text);
  error.status = response.status;
  return error;
}
