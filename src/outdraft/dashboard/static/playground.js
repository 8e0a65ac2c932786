// The playground: a prompt goes out, panes of coloured tokens come back.

import { byId, html } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { Explorer } from "./explorer.js";
import { duration, number } from "./format.js";
import { originsWith } from "./origins.js";
import { Pane } from "./pane.js";
import { Race } from "./race.js";
import { firstDifference, Run } from "./run.js";
import * as settings from "./settings.js";

const NEAR_END_PX = 80;

export class Playground {
  constructor(api, detail) {
    this.api = api;
    this.detail = detail;
    this.messages = []; // of the chat so far
    this.aborter = null; // while a run is going on
    this.form = byId("playground");
    this.prompt = byId("prompt");
    this.transcript = byId("transcript");
  }

  bind() {
    settings.bindSettings();
    for (const { label, text } of EXAMPLES) {
      const button = html("button", { type: "button", class: "example" }, label);
      button.addEventListener("click", () => {
        this.prompt.value = text;
        this.prompt.focus();
      });
      byId("examples").append(button);
    }
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.aborter) void this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.aborter?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    for (const radio of this.form.elements.mode) {
      radio.addEventListener("change", () => this.clear());
    }
  }

  get isChat() {
    return this.form.elements.mode.value === "chat";
  }

  /** Begin anew: no turns, no messages. */
  clear() {
    this.aborter?.abort();
    this.messages = [];
    for (const turn of this.transcript.querySelectorAll(".turn")) turn.remove();
    byId("welcome").hidden = false;
    byId("clear").hidden = true;
    const label = this.isChat ? "Message" : "Text to complete";
    byId("prompt-label").textContent = label;
    this.prompt.placeholder = label;
    this.prompt.focus();
  }

  async submit() {
    const text = this.prompt.value;
    const request = this.request(text);
    if (!this.isChat) this.clear();
    const turn = this.addTurn(text);
    this.aborter = new AbortController();
    this.setRunning(true);
    try {
      await this.runTurn(turn, request, this.aborter.signal);
    } finally {
      this.aborter = null;
      this.setRunning(false);
    }
    this.remember(text, turn.panes[0].run);
  }

  request(text) {
    const shared = { ...settings.samplingFields(), stream: true };
    const options = { ...shared, stream_options: { include_usage: true } };
    const asks = settings.wantsProbabilities();
    if (!this.isChat) {
      const logprobs = asks ? { logprobs: 0 } : {};
      return { path: "v1/completions", body: { prompt: text, ...options, ...logprobs } };
    }
    const logprobs = asks ? { logprobs: true } : {};
    const messages = [...this.messages, { role: "user", content: text }];
    return { path: "v1/chat/completions", body: { messages, ...options, ...logprobs } };
  }

  addTurn(text) {
    const first = settings.isSpeculating() ? "With speculation" : "Without speculation";
    const titles = settings.isComparing() ? [first, "Without speculation"] : [first];
    const panes = titles.map((title) => new Pane(new Run(), title, this.detail));
    const explorer = new Explorer(panes[0], first, this.detail);
    const element = html(
      "article",
      { class: panes.length > 1 ? "turn compared" : "turn", "aria-label": "Turn" },
      html("pre", { class: "asked", "aria-label": this.isChat ? "Message" : "Prompt" }, text),
      html("div", { class: "panes" }, ...panes.map((pane) => pane.element)),
      explorer.element,
    );
    byId("welcome").hidden = true;
    this.transcript.append(element);
    element.scrollIntoView({ block: "start" });
    return { element, panes, explorer };
  }

  /** One pane after the other: two requests at once would share the engine's time. */
  async runTurn(turn, { path, body }, signal) {
    const { panes, explorer } = turn;
    announce("Running");
    const ways = [settings.speculationFields(), settings.withoutSpeculation()];
    const model = await this.api.model(signal).catch(() => null); // the request itself will say why
    for (const [i, pane] of panes.entries()) {
      const shown = i === 0 ? [pane, explorer] : [pane];
      const salt = panes.length > 1 ? settings.coldCache() : {};
      const request = { model, ...body, ...salt, ...ways[i] };
      const done = await this.runPane(pane, shown, path, request, signal);
      if (i === 0) explorer.open();
      if (!done) return;
    }
    announce(summary(panes[0].run));
    if (panes.every(({ run }) => run.total !== null) && panes.length > 1) {
      this.showRace(turn, body.temperature > 0);
    }
  }

  /** The verdict comes into view, and both runs are replayed for those who like things to move. */
  showRace({ element, panes }, sampled) {
    const [on, off] = panes.map((pane) => pane.run);
    const outcome = compare(on, off, sampled, settings.isLossless());
    const race = new Race(panes, outcome);
    element.querySelector(".panes").before(race.element);
    race.element.scrollIntoView({ block: "start" });
    announce(`${outcome.headline} ${outcome.text}`);
    if (!window.matchMedia("(prefers-reduced-motion: reduce)").matches) race.play();
  }

  /** True if the run came to its end. */
  async runPane(pane, shown, path, body, signal) {
    pane.setState("running");
    pane.run.start();
    try {
      for await (const chunk of this.api.complete(path, body, signal)) {
        this.grow(shown, () => pane.run.add(chunk));
      }
      pane.setState(pane.run.finishReason ?? "ended");
      return true;
    } catch (error) {
      pane.setState(signal.aborted ? "stopped" : "failed");
      if (!signal.aborted) pane.fail(error.message);
      announce(signal.aborted ? "Stopped" : "");
      return false;
    } finally {
      this.grow(shown, () => pane.run.finish());
    }
  }

  /** Follow the text down, unless somebody reads further up. */
  grow(shown, change) {
    const { scrollHeight, scrollTop, clientHeight } = this.transcript;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    change();
    for (const each of shown) each.update();
    if (atEnd) this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  remember(text, run) {
    if (!this.isChat || !run.text) return;
    this.messages.push({ role: "user", content: text }, { role: "assistant", content: run.text });
    this.prompt.value = "";
    byId("clear").hidden = false;
  }

  setRunning(running) {
    const stop = byId("stop");
    const run = byId("run");
    const focused = [stop, run].includes(document.activeElement);
    stop.hidden = !running;
    run.hidden = running;
    if (focused) (running ? stop : run).focus();
  }
}

/** What a comparison came to. Both runs share their seed, so a lossless engine gives one text. */
export function compare(on, off, sampled, lossless) {
  const at = firstDifference(on.text, off.text);
  const speed = `${number(off.total / on.total)} times as fast`;
  const times = `Speculation: ${duration(on.total)}. Without: ${duration(off.total)}.`;
  if (at === null) return { same: true, headline: "Identical text,", text: `${speed}. ${times}` };
  const isLossy = sampled && !lossless;
  const why = isLossy ? " Sampled texts differ: their distribution is not the model’s own." : "";
  const headline = `The texts differ from character ${at + 1},`;
  return { same: false, headline, text: `${speed}. ${times}${why}` };
}

function summary(run) {
  return `Done: ${run.numTokens} tokens in ${duration(run.total)}, ${number(run.rate)} a second`;
}

function announce(text) {
  byId("status").textContent = text;
}

/** Explain the origins that an engine with these sources gives. */
export function showLegends(sources) {
  byId("legend").replaceChildren();
  byId("meanings").replaceChildren();
  for (const { name, label, meaning } of originsWith(sources)) {
    const sample = html("span", { class: `token origin-${name}` }, label);
    byId("legend").append(html("li", {}, sample));
    const term = html("span", { class: `token origin-${name}` }, label);
    byId("meanings").append(html("div", {}, html("dt", {}, term), html("dd", {}, meaning)));
  }
}
