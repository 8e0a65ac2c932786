// Puts the page together.

import { Api } from "./api.js";
import { Detail } from "./detail.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";
import { Playground, showLegends } from "./playground.js";
import { showFacts } from "./settings.js";
import { bindThemeButton } from "./theme.js";

function bindTabs(onChange) {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const select = (tab) => {
    for (const other of tabs) {
      const selected = other === tab;
      other.setAttribute("aria-selected", String(selected));
      other.tabIndex = selected ? 0 : -1;
      byId(other.getAttribute("aria-controls")).hidden = !selected;
    }
    onChange();
  };
  for (const [at, tab] of tabs.entries()) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[(at + 1) % tabs.length]; // there are two
      select(other);
      other.focus();
    });
  }
  if (location.hash === "#live") select(byId("tab-live"));
}

function showEngine(facts) {
  const { model, device, dtype, speculation_methods: sources } = facts;
  byId("engine").textContent = [model, device, dtype].filter(Boolean).join(" · ");
  showFacts(facts);
  showLegends(sources);
}

const api = new Api(() => byId("api-key").value); // the key is nowhere but in its field
const live = new Live(api, showEngine);
bindThemeButton(byId("theme"));
bindTabs(() => live.draw());
new Playground(api, new Detail()).bind();
void live.follow();
