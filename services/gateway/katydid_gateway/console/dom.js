// Elements without markup in strings: text is always text. And numbers as people read them.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function count(value) {
  if (value == null) return "–";
  if (value < 10_000) return `${Math.round(value)}`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)}K` : `${(value / 1e6).toFixed(1)}M`;
}

export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

// A bar of parts, [class, amount, label], with its legend; what a reader of the screen hears is the legend.
export function stack(parts, whole) {
  const bar = element("div", { class: "stack", "aria-hidden": "true" });
  const legend = element("div", { class: "legend" });
  for (const [kind, amount, label] of parts) {
    const part = element("div", { class: `part ${kind}` });
    part.style.width = whole > 0 ? `${(100 * amount) / whole}%` : "0";
    bar.append(part);
    legend.append(element("span", {}, element("span", { class: `swatch ${kind}` }), label));
  }
  return element("div", {}, bar, legend);
}
