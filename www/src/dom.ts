// Typed access to the page's fixed elements, which index.html holds.

/** The element with this id, which must be of this kind. */
export function byId<E extends HTMLElement>(id: string, kind: abstract new () => E): E {
  const element = document.getElementById(id);
  if (element instanceof kind) return element;
  throw new Error(`index.html has no ${kind.name} with the id "${id}"`);
}

/** A new element with a class and text. Text is only ever set as text. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  { className = "", text = "" } = {},
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (className !== "") element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}
