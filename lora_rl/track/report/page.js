// The value under the pointer, in every chart of the same horizontal axis at once. Without this the page is complete.
"use strict";
const charts = [...document.querySelectorAll("svg[data-lines]")].map((svg) => {
  const data = JSON.parse(svg.dataset.lines);
  const output = svg.closest("figure").querySelector("output");
  return { svg, data, output, cursor: svg.querySelector(".cursor") };
});

function text(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Points are in the order of x: the nearest by bisection.
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return x - points[low][0] < points[high][0] - x ? points[low] : points[high];
}

function show(chart, x) {
  const [low, high, begin, end] = chart.data.x;
  const filled = chart.data.lines.filter((line) => line.points.length > 0);
  if (x < low || x > high || filled.length === 0) return hide(chart);
  // The place is that of a value, not of the pointer.
  const at = filled.map((line) => nearest(line.points, x)[0]).reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
  const place = begin + ((at - low) / (high - low)) * (end - begin);
  chart.cursor.setAttribute("x1", place);
  chart.cursor.setAttribute("x2", place);
  chart.cursor.style.visibility = "visible";
  const values = filled.map((line) => `${line.label} ${text(nearest(line.points, at)[1])}`);
  chart.output.textContent = `${chart.data.unit} ${text(at)}: ${values.join(", ")}`;
}

function hide(chart) {
  chart.cursor.style.visibility = "hidden";
  chart.output.textContent = "";
}

for (const chart of charts) {
  const same = charts.filter((other) => other.data.unit === chart.data.unit);
  chart.svg.addEventListener("pointermove", (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.svg.getScreenCTM().inverse()).x;
    const [low, high, begin, end] = chart.data.x;
    const x = low + ((place - begin) / (end - begin)) * (high - low);
    same.forEach((other) => show(other, Math.min(Math.max(x, low), high)));
  });
  chart.svg.addEventListener("pointerleave", () => same.forEach(hide));
}
