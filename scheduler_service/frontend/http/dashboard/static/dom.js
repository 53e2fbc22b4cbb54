// Elements in few words. Text is always text: nothing here takes markup.

export const $ = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Sets text only where it changed, so that a page at rest stays at rest.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes `parent`'s children those with these keys, in order, keeping what is there.
export function keyed(parent, keys, make) {
  const present = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = keys.map((key) => {
    const known = present.get(key);
    present.delete(key);
    if (known) return known;
    const made = make(key);
    made.dataset.key = key;
    return made;
  });
  for (const child of present.values()) child.remove();
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  return wanted;
}

// Definition pairs: [term, value] with a stable order.
export function fillPairs(list, pairs) {
  const rows = keyed(list, pairs.map(([term]) => term), (term) =>
    element("div", {}, element("dt", {}, term), element("dd")),
  );
  rows.forEach((row, index) => setText(row.lastChild, pairs[index][1]));
}
