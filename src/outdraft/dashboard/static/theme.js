// Light or dark: the system's choice until the visitor makes one. Loaded before the first paint.

const THEMES = ["system", "light", "dark"];
const KEY = "outdraft-theme";

function stored() {
  try {
    const theme = localStorage.getItem(KEY);
    return THEMES.includes(theme) ? theme : "system";
  } catch {
    return "system"; // storage is refused in some private windows
  }
}

function store(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // It lasts until the page is left.
  }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
}

/** A button that goes through the themes. */
export function bindThemeButton(button) {
  let theme = stored();
  const show = () => {
    apply(theme);
    button.setAttribute("aria-label", `Theme: ${theme}`);
    button.title = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    store(theme);
    show();
  });
  show();
}

apply(stored());
