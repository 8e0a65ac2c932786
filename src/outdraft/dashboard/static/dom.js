// Small helpers for building elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** An HTML element; null attributes and null children are left out. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/**
 * One tab stop for many elements: the arrow keys, Home and End move between them.
 *
 * `selector` names the elements inside `container`; they carry tabindex -1 but for one.
 */
export function rovingFocus(container, selector) {
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  container.addEventListener("keydown", (event) => {
    const items = [...container.querySelectorAll(selector)];
    const at = items.indexOf(document.activeElement);
    if (at < 0) return;
    let to = null;
    if (event.key in moves) to = Math.min(items.length - 1, Math.max(0, at + moves[event.key]));
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = items.length - 1;
    if (to === null) return;
    event.preventDefault();
    items[to].focus();
  });
  container.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector)) return;
    const stops = container.querySelectorAll(`${selector}[tabindex="0"]`);
    for (const other of stops) other.tabIndex = -1;
    event.target.tabIndex = 0;
  });
}
