// The score threshold: what the table counts, and what the images show.
const sliders = [...document.querySelectorAll("input.threshold")];
if (sliders.length) {
  const PAGE = 12;
  const find = (selector) => document.querySelector(selector);
  const category = find("select.category"), order = find("select.order"), more = find("button.more");
  const table = find("table.counts"), browser = find(".browser");
  const sum = (counts, start) => counts.slice(start).reduce((all, count) => all + count, 0);
  const rows = [...table.tBodies[0].rows, ...table.tFoot.rows].map((row) => ({
    cells: [...row.cells].slice(1),
    found: row.dataset.found.split(",").map(Number),
    wrong: row.dataset.false.split(",").map(Number),
  }));
  const figures = [...browser.children].map((figure, place) => ({
    figure, place,
    verdict: figure.querySelector("figcaption span"),
    shapes: [...figure.querySelectorAll("g")].map((shape) => ({
      shape, kind: shape.classList[0], category: shape.dataset.k, last: +shape.dataset.p,
    })),
  }));
  let position = +sliders[0].value, limit = PAGE;

  const show = (cell, text, value) => {
    cell.textContent = text;
    cell.dataset.v = value;
  };
  const share = (cell, part, whole) => {
    if (whole) cell.style.setProperty("--w", part / whole);
    cell.classList.toggle("bar", whole > 0);
    show(cell, whole ? (part / whole).toFixed(3) : "-", whole ? part / whole : "");
  };
  const count = () => {
    for (const {cells, found, wrong} of rows) {
      const objects = +cells[0].dataset.v, right = sum(found, position), bad = sum(wrong, position);
      [right, objects - right, bad].forEach((n, i) => show(cells[i + 1], n.toLocaleString("en"), n));
      share(cells[4], right, right + bad);
      share(cells[5], right, objects);
      share(cells[6], 2 * right, right + bad + objects);
    }
  };
  const draw = () => {
    const object = find("input.objects").checked, found = find("input.detections").checked;
    const wanted = {object, found, wrong: found};
    for (const one of figures) {
      one.found = one.missed = one.wrong = 0;
      for (const {shape, kind, category: own, last} of one.shapes) {
        const reached = last >= position, isObject = kind === "object";
        const counts = (isObject || reached) && (!category.value || own === category.value);
        shape.classList.toggle("missed", isObject && !reached);
        shape.toggleAttribute("hidden", !(counts && wanted[kind]));
        if (counts && isObject) one[reached ? "found" : "missed"] += 1;
        if (counts && kind === "wrong") one.wrong += 1;
      }
      one.errors = one.missed + one.wrong;
      one.verdict.textContent = `${one.found} found, ${one.missed} missed, ${one.wrong} false`;
    }
  };
  const arrange = () => {
    const key = order.value;
    figures.sort((a, b) => (key ? b[key] - a[key] : 0) || a.place - b.place);
    const fit = figures.filter((one) => !category.value || one.found + one.errors);
    for (const one of figures) one.figure.hidden = true;
    for (const one of fit.slice(0, limit)) one.figure.hidden = false;
    more.hidden = fit.length <= limit;
    browser.append(...figures.map((one) => one.figure));
  };
  const move = () => {
    const {low, high} = sliders[0].dataset;
    const score = +low + ((high - low) * position) / sliders[0].max;
    for (const slider of sliders) {
      slider.value = position;
      slider.closest("label").querySelector("output").textContent = score.toFixed(2);
    }
    for (const head of table.tHead.querySelectorAll("[aria-sort]")) head.removeAttribute("aria-sort");
    count();
    draw();
  };
  for (const slider of sliders) {
    slider.addEventListener("input", () => {
      position = +slider.value;
      move();
    });
    slider.addEventListener("change", arrange);  // not while it moves: the images would jump
  }
  for (const control of document.querySelectorAll(".controls select, .controls [type=checkbox]")) {
    control.addEventListener("change", () => {
      limit = PAGE;
      draw();
      arrange();
    });
  }
  more.addEventListener("click", () => {
    limit += PAGE;
    arrange();
  });
  browser.addEventListener("click", (event) => {
    const frame = event.target.closest("button.frame");
    if (!frame) return;
    const isWide = frame.closest("figure").classList.toggle("wide");
    frame.setAttribute("aria-expanded", isWide);
  });
  move();  // a reload may keep where the controls were
  arrange();
}
