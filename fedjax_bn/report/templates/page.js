// Columns sort by a click on their heads; curves show their values below the pointer; names in a key turn
// colours on and off; of panels one is shown.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      // The cell's text without its notes: "▲ +1.2", "84.9 (0.3)" and "1,000" are numbers, "-" is missing.
      const value = row => (row.cells[column].firstChild?.textContent ?? "").trim()
        .replace(/^[▲▼] | \([\d.]+\)$/g, "").replace(/(?<=\d),(?=\d)/g, "");
      const missing = text => ["", "-", "?", "baseline"].includes(text);
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);  // stays below
        const by = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -by : by;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(order));
    });
  });
}
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), rule = svg.querySelector(".rule");
  const readout = figure.querySelector(".readout");
  const lines = [...svg.querySelectorAll("polyline")].map(line => ({
    series: line.parentElement.classList,
    name: line.dataset.name,
    at: [...line.points].map(point => point.x),
    x: line.dataset.x.split(" "),
    y: line.dataset.y.split(" "),
  }));
  const places = new Map(lines.flatMap(line => line.at.map((at, i) => [at, line.x[i]])));
  const read = event => {
    const box = svg.getBoundingClientRect();
    const pointer = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const nearest = [...places.keys()].reduce((a, b) =>
      Math.abs(b - pointer) < Math.abs(a - pointer) ? b : a);
    const values = lines.filter(line => !line.series.contains("off") && line.at.includes(nearest))
      .map(line => `${line.name} ${line.y[line.at.indexOf(nearest)]}`);
    readout.textContent = `round ${places.get(nearest)}: ${values.join(", ")}`;
    readout.style.display = "block";
    rule.setAttribute("x1", nearest);
    rule.setAttribute("x2", nearest);
    rule.style.visibility = "visible";
  };
  const hide = () => { readout.style.display = "none"; rule.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", read);
  svg.addEventListener("pointerdown", read);
  figure.addEventListener("pointerleave", hide);
}
for (const button of document.querySelectorAll(".key button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const line of button.closest("section").querySelectorAll("polyline"))
      if (line.dataset.name === button.dataset.name) {
        line.parentElement.classList.toggle("off", !on);
        if (on) line.ownerSVGElement.append(line.parentElement);  // above the others
      }
  });
}
for (const box of document.querySelectorAll(".panels")) {
  const panels = [...box.querySelectorAll(".panel")], choice = document.createElement("div");
  choice.className = "choice";
  const show = chosen => panels.forEach((panel, i) => {
    panel.hidden = panel !== chosen;
    choice.children[i].setAttribute("aria-pressed", panel === chosen);
  });
  for (const panel of panels) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = panel.dataset.title;
    button.addEventListener("click", () => show(panel));
    choice.append(button);
    panel.querySelector("h4").hidden = true;
  }
  box.prepend(choice);
  show(panels[0]);
}
