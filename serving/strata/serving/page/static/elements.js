// Elements from text. Markup is never parsed: answers of a model are not trusted.

export function element(name, { text, ...attributes } = {}, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

export function pairs(list) {
  return element("dl", { class: "facts" }, list.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
}

export function options(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name, text: name })));
  if (names.includes(chosen)) select.value = chosen;
}

export const byId = (id) => document.getElementById(id);

// Announces a text to screen readers. Streams announce their beginning and their end, not every token.
export function announce(text) {
  const region = byId("announcement");
  region.append(element("p", { text }));
  while (region.children.length > 4) region.firstElementChild.remove();
}
