// Elements from data. Text is only ever set as text: nothing here, or elsewhere, parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fitOut(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// h("td", {class: "number"}, "12"): children are elements or text.
export function h(tag, attributes = {}, ...children) {
  return fitOut(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fitOut(document.createElementNS(SVG, tag), attributes, children);
}

// Replace what is shown, and keep the focus on the element with the same data-key.
export function fill(parent, ...children) {
  const active = document.activeElement;
  const key = parent.contains(active) ? active.dataset.key : undefined;
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child != null));
  if (key !== undefined) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
