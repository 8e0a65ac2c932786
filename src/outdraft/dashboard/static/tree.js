// One step as a tree: what was guessed behind which token, what the model kept, how likely it was.

import { html, svg } from "./dom.js";
import { layOut, visible } from "./draft.js";
import { probability } from "./format.js";
import { originLabel } from "./origins.js";

const CHARACTER_PX = 7.7; // of the nodes' typeface, at most
const SMALL_PX = 7.3; // of what stands below
const MOST_CHARACTERS = 16; // of a node; the rest is cut
const NODE_PX = { min: 58, around: 18, height: 42, gapX: 26, gapY: 10 };

/**
 * @param step as decodeChunk gives it. @param before the text in front of the draft.
 * @param own the model's own token behind what it accepted, or null.
 */
export function drawTree(step, before, own) {
  const nodes = layOut(step, before, own);
  const columns = columnsOf(nodes);
  const boxes = nodes.map(({ level, line }) => ({
    x: columns[level].x,
    y: line * (NODE_PX.height + NODE_PX.gapY),
    width: columns[level].width,
  }));
  const width = columns.at(-1).x + columns.at(-1).width;
  const height = Math.max(...boxes.map(({ y }) => y)) + NODE_PX.height;
  const links = nodes.map((node, i) => link(node, boxes[node.parent], boxes[i]));
  const lines = svg("svg", { width, height, "aria-hidden": "true" }, ...links);
  const items = nodes.map((node, i) => item(node, boxes[i], nodes));
  const list = html("ol", { class: "tree-rows" }, ...items);
  const drawing = html("div", { class: "tree-drawing" }, lines, list);
  drawing.style.width = `${width}px`;
  drawing.style.height = `${height}px`;
  return drawing;
}

/** Left edge and width of every level: as wide as its longest text. */
function columnsOf(nodes) {
  const columns = [];
  for (const node of nodes) {
    const column = (columns[node.level] ??= { x: 0, width: NODE_PX.min });
    const characters = Math.min(MOST_CHARACTERS, visible(node.text).length);
    const small = [nameOf(node), chanceOf(node)].join(" ").length;
    const fit = Math.max(characters * CHARACTER_PX, small * SMALL_PX) + NODE_PX.around;
    column.width = Math.ceil(Math.max(column.width, fit));
  }
  for (const [level, column] of columns.entries()) {
    const left = columns[level - 1];
    column.x = left ? left.x + left.width + NODE_PX.gapX : 0;
  }
  return columns;
}

function link({ state, origin }, from, to) {
  if (!from) return null;
  const middle = NODE_PX.height / 2;
  const [x0, y0] = [from.x + from.width, from.y + middle];
  const [x1, y1] = [to.x, to.y + middle];
  const bend = x0 + NODE_PX.gapX / 2;
  const path = `M${x0},${y0}C${bend},${y0} ${bend},${y1} ${x1},${y1}`;
  return svg("path", { class: `link-${state} origin-${origin}`, d: path });
}

function item(node, box, nodes) {
  const { row, parent, state, origin, text, logprob } = node;
  const chance = chanceOf(node);
  const tag = state === "rejected" ? "del" : "span";
  const look = origin === null ? "node-text" : `node-text token origin-${origin}`;
  const element = html(
    "li",
    { class: `node node-${state} origin-${origin}`, "data-row": row, title: title(node) },
    html(tag, { class: look }, visible(text) || "∅"),
    html("span", { class: "node-row" }, nameOf(node), chance && html("b", {}, ` ${chance}`)),
    html("span", { class: "hidden" }, `, ${place(node, nodes[parent])}`),
    logprob === undefined ? null : chanceBar(logprob),
  );
  element.style.left = `${box.x}px`;
  element.style.top = `${box.y}px`;
  element.style.width = `${box.width}px`;
  return element;
}

function nameOf({ row, origin }) {
  return row === null ? originLabel(origin) : `row ${row}`;
}

function chanceOf({ logprob }) {
  return logprob === undefined ? null : probability(logprob);
}

function title({ state, origin, text }) {
  if (state === "root") return `before the draft: ${JSON.stringify(text)}`;
  const words = state === "own" ? "the model itself" : state;
  return `${originLabel(origin)}, ${words}: ${JSON.stringify(text)}`;
}

/** In words what the lines and the place say. */
function place({ state, origin }, parent) {
  if (state === "root") return "the token before the draft";
  const behind = parent.row === null ? "" : ` behind row ${parent.row}`;
  if (state === "own") return `the model itself,${behind}`;
  return `${originLabel(origin)}, ${state},${behind}`;
}

function chanceBar(logprob) {
  const fill = html("span", { class: "chance-fill" });
  fill.style.width = `${(Math.exp(logprob) * 100).toFixed(1)}%`;
  return html("span", { class: "chance", "aria-hidden": "true" }, fill);
}
