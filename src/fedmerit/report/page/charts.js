// Draws the charts; the last script of every page. All data is in the page; nothing is loaded.

const views = [];

async function draw(element) {
  const spec = data.charts[element.dataset.chart];
  const options = { renderer: "svg", container: element, hover: false, logLevel: vega.Warn };
  const label = element.getAttribute("aria-label"); // says more than the chart's own
  const view = new vega.View(vega.parse(spec), options);
  if (element.dataset.who !== undefined) view.signal("who", element.dataset.who);
  views.push(view);
  await view.runAsync();
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
  element.removeAttribute("aria-roledescription");
}

function redraw() {
  window.dispatchEvent(new Event("resize")); // charts measure their containers
  views.forEach((view) => view.run());
}

// Printed pages show every table, and charts as wide as paper; afterwards all is as it was.
const opened = [];
window.addEventListener("beforeprint", () => {
  document.body.classList.add("paper");
  redraw();
  for (const each of document.querySelectorAll("details:not([open])")) {
    each.open = true;
    opened.push(each);
  }
});
window.addEventListener("afterprint", () => {
  document.body.classList.remove("paper");
  redraw();
  opened.splice(0).forEach((each) => (each.open = false));
});

await Promise.all([...document.querySelectorAll("[data-chart]")].map(draw));
document.documentElement.dataset.drawn = "yes";
