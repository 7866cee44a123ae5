// The page: settings, the panes of the chat or the form for pictures, and the state of the platform.

import { Pane } from "./chat.js";
import { byId } from "./elements.js";
import { Endpoint } from "./endpoint.js";
import { Live } from "./live.js";
import { Pictures } from "./pictures.js";

const endpoint = new Endpoint();
const panes = [new Pane(endpoint, 1)];
const pictures = new Pictures(endpoint);
let models = [];
let refused = false; // for want of a key, at the last look
let listed = ""; // the names for which the models were read

function showModels(state) {
  byId("summary").textContent = `${state.models.join(", ")} · ${state.kind}`;
  byId("chat").hidden = byId("sampling").hidden = state.kind === "pictures";
  byId("pictures").hidden = state.kind !== "pictures";
  document.querySelector(".skip").href = state.kind === "pictures" ? "#prompt" : "#message";
}

// Models come and go while the endpoint runs.
async function stateChanged(state, error) {
  if (error) {
    byId("summary").textContent = error.message;
    if (error.status === 401 && !refused) byId("connection").open = true;
    refused = error.status === 401;
    return;
  }
  refused = false;
  showModels(state);
  if (listed === state.models.join("\n")) return;
  const found = await endpoint.json("v1/models").catch(() => null);
  if (found === null) return; // the next look asks again
  listed = state.models.join("\n");
  models = found.data.map(({ id }) => id);
  for (const pane of panes) pane.show(models);
  pictures.show(models);
}

const live = new Live(endpoint, stateChanged);

function settings() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return { system: byId("system").value.trim(), temperature: number("temperature"), maxTokens: number("max-tokens") };
}

async function send() {
  const message = byId("message").value.trim();
  if (!message || !byId("stop").disabled) {
    byId("message").focus();
    return;
  }
  byId("message").value = "";
  byId("message").focus(); // a disabled button cannot have the focus
  byId("send").disabled = true;
  byId("stop").disabled = false;
  await Promise.all(panes.map((pane) => pane.send(message, settings())));
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

function stop() {
  for (const pane of panes) pane.stop();
}

function compare() {
  const on = panes.length === 1;
  if (on) {
    const second = new Pane(endpoint, 2);
    second.show(models);
    second.choose(models.find((model) => model !== panes[0].model) ?? models[0] ?? "");
    second.continueFrom(panes[0].history);
    panes.push(second);
    byId("panes").append(second.element);
  } else {
    const removed = panes.pop();
    removed.clear();
    removed.element.remove();
  }
  byId("compare").setAttribute("aria-pressed", String(on));
}

function useKey() {
  endpoint.use(byId("key").value, byId("remember").checked);
  live.look();
}

byId("panes").append(panes[0].element);
byId("key").value = endpoint.key;
byId("remember").checked = endpoint.stored;
byId("key").addEventListener("change", useKey);
byId("remember").addEventListener("change", useKey);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stop();
});
byId("stop").addEventListener("click", stop);
byId("compare").addEventListener("click", compare);
byId("clear").addEventListener("click", () => {
  for (const pane of panes) pane.clear();
  byId("message").focus();
});
live.run();
