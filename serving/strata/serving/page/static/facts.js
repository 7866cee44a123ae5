// What the platform did for one answer: measured in this page, reported by the endpoint, in words.

const REASONS = {
  short: "the prompt is short",
  cached: "most of the prompt is cached",
  "no-prefill-engine": "no prefill engine is up",
  "prefill-busy": "the prefill engines are busy",
  "cheaper-here": "cheaper on the decode engine",
  "prefill-failed": "the remote prefill failed",
  "several-sequences": "several sequences",
  "prompt-logprobs": "prompt logprobs",
  "not-tokens": "the prompt is not made of tokens",
  images: "the prompt has images",
  "no-decode-replica": "no decode replica is up",
  "cheaper-there": "cheaper on the prefill engine",
  long: "the prompt is long",
  always: "set by the recipe",
};

export class Clock {
  #began;
  #last = null;
  #gaps = [];

  constructor(began) {
    this.#began = began;
    this.first = null;
  }

  // A part of the answer arrived.
  tick(at) {
    if (this.first === null) this.first = at - this.#began;
    else this.#gaps.push(at - this.#last);
    this.#last = at;
  }

  get itl() {
    if (!this.#gaps.length) return null;
    const sorted = [...this.#gaps].sort((one, other) => one - other);
    return { p50: sorted[Math.floor((sorted.length - 1) / 2)], max: sorted[sorted.length - 1] };
  }

  get seconds() {
    return this.#last === null ? 0 : (this.#last - this.#began) / 1000;
  }
}

export const milliseconds = (value) => (value < 1000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(2)} s`);

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) {
    count /= 1024;
    at += 1;
  }
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
}

// "remote; engine=5ed2" as {"": "remote", engine: "5ed2"}.
function parameters(header) {
  return Object.fromEntries((header ?? "").split(";").map((part) => {
    const [name, value] = part.trim().split("=");
    return value === undefined ? ["", name] : [name, value];
  }));
}

function prefill(headers, explained) {
  const header = parameters(headers.get("x-strata-prefill"));
  const known = explained?.prefill ?? {};
  const where = known.where ?? header[""];
  if (!where) return null;
  const reason = known.reason ?? header.reason;
  const engine = known.engine ?? header.engine;
  const parts = [where];
  if (reason) parts.push(REASONS[reason] ?? reason);
  if (engine) parts.push(`engine ${engine.slice(0, 8)}`);
  if (known.seconds) parts.push(milliseconds(known.seconds * 1000));
  return parts.join(", ");
}

function cached(usage, explained) {
  const tiers = explained?.cached_tokens;
  const prompt = usage?.prompt_tokens ?? explained?.prompt_tokens;
  // The engine that prefilled decides what was computed; a decode engine counts transferred tokens as cached, too.
  const where = explained?.prefill?.where === "remote" ? "prefill" : "decode";
  const total = tiers?.[where] ?? usage?.prompt_tokens_details?.cached_tokens;
  if (total === undefined || total === null) return null;
  const named = Object.entries(tiers ?? {}).map(([tier, count]) => `${tier} ${count}`);
  return `${total}${prompt ? ` of ${prompt}` : ""}${named.length ? ` (${named.join(", ")})` : ""}`;
}

function moved(explained) {
  if (explained?.moved_tokens === undefined) return null;
  if (!explained.moved_tokens) return "none";
  return `${explained.moved_bytes === null ? "" : `${bytes(explained.moved_bytes)}, `}${explained.moved_tokens} tokens`;
}

function failover(explained) {
  const called = explained?.replicas ?? [];
  if (called.length < 2) return null;
  return called.slice(1).map(({ name, after }) => `${after ? `continued on ${name} after ${after} tokens` : `sent again to ${name}`}`).join("; ");
}

// [name, value] pairs in the order in which they are shown; a fact that is not known is left out.
export function facts({ clock, headers, usage, explained }) {
  const routed = parameters(headers.get("x-strata-replica"));
  const replica = explained?.replicas?.at(-1)?.name ?? routed[""];
  const itl = clock.itl;
  const tokens = usage?.completion_tokens;
  const waited = explained?.waited_s || Number.parseFloat(headers.get("x-strata-waited") ?? "0");
  return [
    ["Replica", replica && routed.reason ? `${replica}, chosen by ${routed.reason}` : replica],
    ["Prefill", prefill(headers, explained)],
    ["Cached tokens", cached(usage, explained)],
    ["KV moved", moved(explained)],
    ["TTFT", clock.first === null ? null : milliseconds(clock.first)],
    ["ITL", itl && `p50 ${milliseconds(itl.p50)}, max ${milliseconds(itl.max)}`],
    ["Tokens", tokens && `${tokens}${clock.seconds ? `, ${(tokens / clock.seconds).toFixed(0)} per second` : ""}`],
    ["Queue", explained?.queued_s ? milliseconds(explained.queued_s * 1000) : null],
    ["Waited", waited ? `${waited.toFixed(1)} s for an engine` : null],
    ["Failover", failover(explained)],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
}

// The explanation in a comment of a stream, null for other comments.
export function explanation(comment) {
  const name = "x-strata-explain ";
  return comment.startsWith(name) ? JSON.parse(comment.slice(name.length)) : null;
}
