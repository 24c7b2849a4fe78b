// Columns sort by a click on their heads; curves are read off below the pointer.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");  // what is missing stays below
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
    const told = lines.filter(line => line.at.includes(nearest))
      .map(line => `${line.name} ${line.y[line.at.indexOf(nearest)]}`);
    readout.textContent = `${svg.dataset.unit} ${places.get(nearest)}: ${told.join(", ")}`;
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
