// Sends an image, draws what was found in it, and draws again when the threshold changes.
"use strict";

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const canvas = byId("canvas");
const FILL = 0.42; // opacity, as in the images that `infer` writes
const MOST_HIDDEN = 0.35; // of an object by a label, as there
const MAX_HEIGHT = 0.72; // of the window
const SHOWN_CLASSES = 12;
const DARK = "rgb(30, 30, 30)"; // borders of keypoints, as there

let model = { classes: [], colors: ["#1595ff"], max_bytes: Infinity };
let shown = null; // {picture, width, height, objects} of the last image that was answered
let chosen = null; // the object that the pointer or the list points at
let request = null; // AbortController of the image that is on its way

async function read(response) {
  const type = response.headers.get("Content-Type") || "";
  const content = type.startsWith("application/json") ? await response.json() : {};
  if (!response.ok) throw new Error(content.error || `the server says ${response.status}`);
  return content;
}

async function start() {
  model = await read(await fetch("model"));
  const names = model.classes.map((entry) => entry.name);
  const counted = names.length === 1 ? "1 class" : `${names.length} classes`;
  const more = names.length > SHOWN_CLASSES ? ", .." : "";
  byId("classes").textContent = `${counted}: ${names.slice(0, SHOWN_CLASSES).join(", ")}${more}`;
  byId("masks").parentElement.hidden = !model.masks;
  byId("points").parentElement.hidden = !model.keypoints;
  if (model.view) byId("file").accept = ""; // also arrays of NumPy, which have no type
}

async function detect(file) {
  if (request) request.abort();
  const current = request = new AbortController();
  byId("error").textContent = "";
  byId("status").textContent = "Looking for objects..";
  main.classList.add("busy");
  let lost = false, picture = null;
  try {
    if (file.size > model.max_bytes) {
      const most = Math.floor(model.max_bytes / (1 << 20));
      throw new Error(`the file has more than ${most} MB, the most that is taken`);
    }
    const options = {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream" },
      signal: current.signal,
    };
    // What a browser cannot decode, or not as the model sees it, the server shows.
    picture = model.view ? null : await createImageBitmap(file).catch(() => null);
    const address = `detect?masks=outlines&score_threshold=0&view=${picture ? 0 : 1}`;
    const unreachable = (error) => {
      lost = true;
      throw error;
    };
    const answer = await fetch(address, options).catch(unreachable).then(read);
    picture ||= await viewed(answer).catch(() => null);
    current.signal.throwIfAborted(); // another image has been chosen meanwhile
    show(answer, picture);
    byId("status").textContent = picture ? "" : "This browser cannot show the image.";
  } catch (error) {
    picture?.close();
    const message = lost ? await whyLost() : `Error: ${error.message}.`;
    if (current.signal.aborted) return;
    clear(); // or the message would stand below another image and its objects
    byId("error").textContent = message;
    byId("status").textContent = "";
  } finally {
    if (request === current) main.classList.remove("busy");
  }
}

// The image as the server shows it, whose bands or orientation a browser does not know.
async function viewed(answer) {
  const image = new Image();
  image.src = answer.image.view;
  await image.decode();
  return createImageBitmap(image);
}

// A connection that gives way to others ends without an answer.
async function whyLost() {
  const reached = await fetch("health").then((response) => response.ok, () => false);
  if (!reached) return "The server cannot be reached.";
  return "Error: the connection was closed before there was an answer, try again.";
}

function show(answer, picture) {
  const objects = answer.detections.map((found, i) => ({
    name: found.category,
    score: found.score,
    box: found.bbox,
    color: model.colors[i % model.colors.length],
    outline: outlineOf(found.segmentation || []),
    points: pointsOf(found.keypoints || [], found.keypoint_scores || []),
  }));
  if (shown && shown.picture) shown.picture.close();
  shown = { picture, ...answer.image, objects };
  chosen = null;
  byId("drop").hidden = true;
  canvas.hidden = byId("panel").hidden = false;
  main.classList.add("found");
  update();
}

function clear() {
  if (shown && shown.picture) shown.picture.close();
  shown = chosen = null;
  byId("drop").hidden = false;
  canvas.hidden = byId("panel").hidden = true;
  byId("objects").replaceChildren();
  main.classList.remove("found");
}

function outlineOf(parts) {
  const path = new Path2D();
  for (const part of parts) {
    path.moveTo(part[0], part[1]);
    for (let i = 2; i < part.length; i += 2) path.lineTo(part[i], part[i + 1]);
    path.closePath();
  }
  return path;
}

// x and y of each keypoint, null for one that is too unsure to be drawn.
function pointsOf(values, scores) {
  const least = model.keypoints ? model.keypoints.threshold : null;
  const isSure = (score) => least === null || score >= least;
  return scores.map((score, i) => (isSure(score) ? values.slice(3 * i, 3 * i + 2) : null));
}

function visible() {
  const threshold = Number(byId("threshold").value);
  return shown.objects.filter((object) => object.score >= threshold);
}

function update() {
  const objects = visible();
  if (!objects.includes(chosen)) chosen = null;
  byId("value").textContent = Number(byId("threshold").value).toFixed(2);
  const plural = objects.length === 1 ? "object" : "objects";
  byId("count").textContent = `${objects.length || "No"} ${plural}`;
  byId("objects").replaceChildren(...objects.map(entry));
  draw();
}

function entry(object) {
  const item = document.createElement("li"), button = document.createElement("button");
  const [swatch, name, score] = ["swatch", "", ""].map((kind) => {
    const part = document.createElement("span");
    part.className = kind;
    return part;
  });
  swatch.style.background = object.color;
  name.textContent = name.title = object.name;
  score.textContent = object.score.toFixed(2);
  button.type = "button";
  button.append(swatch, name, score);
  button.addEventListener("click", () => choose(chosen === object ? null : object));
  item.append(button);
  return item;
}

function choose(object) {
  if (chosen === object) return;
  chosen = object;
  draw();
}

function scaleOnPage() {
  const limit = MAX_HEIGHT * window.innerHeight;
  return Math.min(byId("stage").clientWidth / shown.width, limit / shown.height);
}

function draw() {
  const objects = visible(), scale = scaleOnPage();
  const buttons = byId("objects").querySelectorAll("button");
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", objects[i] === chosen));
  canvas.style.width = `${shown.width * scale}px`;
  canvas.style.height = `${shown.height * scale}px`;
  paint(canvas, scale, window.devicePixelRatio || 1);
}

// scale: pixels of the page for one of the image; ratio: pixels of the target for one of the page.
function paint(target, scale, ratio) {
  target.width = Math.max(1, Math.round(shown.width * scale * ratio));
  target.height = Math.max(1, Math.round(shown.height * scale * ratio));
  const context = target.getContext("2d"), objects = visible();
  if (shown.picture) context.drawImage(shown.picture, 0, 0, target.width, target.height);
  context.lineJoin = "round";
  const area = ({ box }) => box[2] * box[3];
  context.scale(scale * ratio, scale * ratio);
  for (const object of [...objects].sort((a, b) => area(b) - area(a))) {
    paintObject(context, object, 1 / scale);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.globalAlpha = 1;
  if (byId("labels").checked) paintLabels(context, chosen ? [chosen] : objects, scale);
}

function paintObject(context, object, pixel) {
  const faded = chosen && chosen !== object ? 0.25 : 1;
  context.fillStyle = context.strokeStyle = object.color;
  if (byId("masks").checked) {
    context.globalAlpha = FILL * faded;
    context.fill(object.outline, "evenodd");
    context.globalAlpha = faded;
    context.lineWidth = 2 * pixel;
    context.stroke(object.outline);
  }
  if (byId("boxes").checked) {
    context.globalAlpha = faded;
    context.lineWidth = 1.5 * pixel;
    context.strokeRect(...object.box);
  }
  if (byId("points").checked && object.points.length) {
    context.globalAlpha = faded;
    paintPoints(context, object, pixel);
  }
}

// Lines in the object's color and white dots, both with dark borders.
function paintPoints(context, object, pixel) {
  const ends = model.keypoints.skeleton.map((line) => line.map((place) => object.points[place]));
  for (const [color, width] of [[DARK, 5], [object.color, 3]]) {
    context.strokeStyle = color;
    context.lineWidth = width * pixel;
    context.beginPath();
    for (const [start, end] of ends) {
      if (!start || !end) continue;
      context.moveTo(...start);
      context.lineTo(...end);
    }
    context.stroke();
  }
  for (const [color, radius] of [[DARK, 4.5], ["white", 3]]) {
    context.fillStyle = color;
    for (const point of object.points.filter(Boolean)) {
      context.beginPath();
      context.arc(...point, radius * pixel, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

// The best scores first; a label that would hide others, or much of an object, is left out.
function paintLabels(context, objects, scale) {
  const width = shown.width * scale, height = shown.height * scale, taken = [];
  const boxes = objects.map(({ box }) => box.map((side) => side * scale));
  const size = width < 500 ? 11 : 13, h = size + 5;
  context.font = `600 ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
  context.textBaseline = "middle";
  const fits = (text) => context.measureText(text).width < Math.max(0.4 * width, 110);
  objects.forEach((object, i) => {
    const [left, top, , tall] = boxes[i];
    const text = shorten(object.name, object.score.toFixed(2), fits);
    const w = context.measureText(text).width + 8;
    const x = Math.max(0, Math.min(left, width - w));
    const places = [top - h, top, top + tall]
      .filter((y) => y >= 0 && y + h <= height)
      .map((y) => [x, y, w, h]);
    const isFree = (place) =>
      taken.every((other) => !overlap(place, other)) &&
      boxes.every((box) => overlap(place, box) <= MOST_HIDDEN * box[2] * box[3]);
    const place = places.find(isFree) || (chosen && places[0]);
    if (!place) return;
    taken.push(place);
    context.fillStyle = object.color;
    context.fillRect(...place);
    context.fillStyle = isLight(object.color) ? "#000" : "#fff";
    context.fillText(text, x + 4, place[1] + h / 2 + 0.5);
  });
}

// The common area of two rectangles [x, y, width, height].
function overlap(one, other) {
  const sides = [0, 1].map((axis) =>
    Math.min(one[axis] + one[axis + 2], other[axis] + other[axis + 2]) -
    Math.max(one[axis], other[axis]));
  return Math.max(0, sides[0]) * Math.max(0, sides[1]);
}

function shorten(name, score, fits) {
  if (fits(`${name} ${score}`)) return `${name} ${score}`;
  let length = Math.min(name.length, 100);
  while (length > 0 && !fits(`${name.slice(0, length)}.. ${score}`)) length -= 1;
  return `${name.slice(0, length).trimEnd()}.. ${score}`;
}

function isLight(color) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 120;
}

// The smallest object at a place of the canvas.
function objectAt(event) {
  const area = canvas.getBoundingClientRect();
  const x = (event.clientX - area.left) / area.width * shown.width;
  const y = (event.clientY - area.top) / area.height * shown.height;
  const inside = visible().filter(({ box }) =>
    x >= box[0] && x < box[0] + box[2] && y >= box[1] && y < box[1] + box[3]);
  inside.sort((a, b) => a.box[2] * a.box[3] - b.box[2] * b.box[3]);
  return inside[0] || null;
}

// In the size of the image, with lines and names as large as on the page.
function save() {
  byId("error").textContent = "";
  const target = document.createElement("canvas");
  paint(target, scaleOnPage(), 1 / scaleOnPage());
  target.toBlob((content) => {
    if (!content) {
      byId("error").textContent = "Error: this browser cannot save an image of this size.";
      return;
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(content);
    link.download = "annotated.png";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // once it is saved
  });
}

function take(list) {
  if (list && list.length) detect(list[0]);
}

byId("file").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  main.classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) main.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  main.classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
byId("threshold").addEventListener("input", () => shown && update());
for (const id of ["masks", "boxes", "points", "labels"]) {
  byId(id).addEventListener("change", () => shown && draw());
}
byId("save").addEventListener("click", save);
canvas.addEventListener("pointermove", (event) => choose(objectAt(event)));
canvas.addEventListener("pointerdown", (event) => choose(objectAt(event)));
canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(null));
window.addEventListener("resize", () => shown && draw());
byId("command").textContent =
  "curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' \\\n" +
  `    '${location.href.replace(/[#?].*/, "")}detect?score_threshold=0.5&masks=rle'`;
start().catch((error) => {
  byId("error").textContent = `The server cannot be reached: ${error.message}.`;
});
