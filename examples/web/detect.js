// Runs model.onnx of `export --format onnx` on an image, and draws what it finds. Where an image is
// on the model's canvas, and how a mask becomes pixels, is as in examples/detect.py.
"use strict";

const byId = (id) => document.getElementById(id);
const COLORS = [[230, 60, 60], [60, 160, 230], [60, 190, 90], [230, 160, 40]];
const OPACITY = 0.4; // of masks

let manifest, session;
let shown = null; // {picture, objects} of the last image

async function start() {
  if (!self.crossOriginIsolated) ort.env.wasm.numThreads = 1; // threads need special headers
  const answer = await fetch("manifest.json");
  if (!answer.ok) throw new Error(`manifest.json: ${answer.status}`);
  manifest = await answer.json();
  session = await ort.InferenceSession.create("model.onnx");
  byId("file").disabled = false;
  byId("status").textContent = "";
}

async function choose(file) {
  byId("file").disabled = true; // a session runs once at a time
  byId("error").textContent = "";
  byId("status").textContent = "Looking for objects..";
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const picture = context.getImageData(0, 0, bitmap.width, bitmap.height);
  const started = performance.now();
  shown = { picture, objects: await detect(picture) };
  const seconds = ((performance.now() - started) / 1000).toFixed(1);
  byId("status").textContent = `${picture.width} x ${picture.height}, ${seconds} s`;
  draw();
}

// Objects in an ImageData: [{name, score, box: [x1, y1, x2, y2], mask}], boxes in its pixels. The
// mask is {left, top, width, height, inside} with a byte for each pixel, or null.
async function detect(picture) {
  const { width, height } = picture;
  const [inputs, size] = prepare(picture);
  const outputs = await session.run(inputs);
  const { boxes, scores, classes, masks, valid } = outputs;
  const names = new Map(manifest.classes.map((entry) => [entry.class, entry.name]));
  const limits = [width, height, width, height];
  const toImage = [width / size[1], height / size[0], width / size[1], height / size[0]];
  const objects = [];
  for (let i = 0; i < scores.dims[1]; i++) {
    if (!valid.data[i]) continue;
    const scaled = (x, k) => Math.fround(Math.min(Math.max(x * toImage[k], 0), limits[k]));
    const box = Array.from(boxes.data.subarray(4 * i, 4 * i + 4), scaled);
    const name = names.get(classes.data[i]), score = scores.data[i];
    const cells = masks && masks.dims[2];
    const grid = masks && masks.data.subarray(i * cells * cells, (i + 1) * cells * cells);
    objects.push({ name, score, box, mask: grid ? paste(grid, cells, box, width, height) : null });
  }
  return objects;
}

// The model's inputs, and [height, width] of the image on the canvas.
function prepare(picture) {
  const rules = manifest.preprocessing, wanted = manifest.inputs.images;
  const size = resizedSize(picture.height, picture.width, rules);
  const [height, width] = rules.canvas, area = height * width;
  const batch = wanted.shape[0] === "batch" ? 1 : wanted.shape[0], planar = wanted.shape[1] === 3;
  const kind = wanted.dtype === "uint8" ? Uint8Array : Float32Array;
  const values = new kind(batch * area * 3), pixels = resize(picture, size, rules);
  for (let y = 0; y < size[0]; y++) {
    for (let x = 0; x < size[1]; x++) {
      for (let c = 0; c < 3; c++) {
        const place = planar ? c * area + y * width + x : (y * width + x) * 3 + c;
        values[place] = pixels[(y * size[1] + x) * 3 + c];
      }
    }
  }
  for (let b = 1; b < batch; b++) values.copyWithin(b * area * 3, 0, area * 3);
  const inputs = { images: new ort.Tensor(wanted.dtype, values, [batch, ...wanted.shape.slice(1)]) };
  if ("image_sizes" in manifest.inputs) {
    const sizes = new Int32Array(2 * batch).map((_, i) => size[i % 2]);
    inputs.image_sizes = new ort.Tensor("int32", sizes, [batch, 2]);
  }
  return [inputs, size];
}

function resizedSize(height, width, rules) {
  const [most, widest] = rules.canvas;
  if (rules.picture_size) {
    const [h, w] = rules.picture_size;
    if (height === h && width === w) return rules.resized_size;
    throw new Error(`the image is ${height} x ${width}, the model takes ${h} x ${w}`);
  }
  let size;
  if (rules.resize === "shortest_edge") {
    if (height > width !== most > widest) {
      throw new Error(`an image of ${height} x ${width} belongs on a canvas that is turned`);
    }
    size = shortestEdge(height, width, rules);
  } else if (rules.resize === "keep" && height <= most && width <= widest) {
    size = [height, width];
  } else if (most * width <= widest * height) {
    size = [most, Math.floor((width * most) / height)];
  } else {
    size = [Math.floor((height * widest) / width), widest];
  }
  return size.map((side, i) => Math.min(Math.max(1, side), rules.canvas[i]));
}

function shortestEdge(height, width, rules) {
  let short = Math.min(...rules.image_size), long = Math.max(...rules.image_size);
  const low = Math.min(height, width), high = Math.max(height, width), sides = [height, width];
  if (rules.rounding_of_sides === "floor") {
    const scale = Math.min(short / low, long / high);
    return sides.map((side) => Math.floor(side * scale));
  }
  if (rules.rounding_of_sides === "round") {
    const scaled = sides.map((side) => (side === low ? short : side * (short / low)));
    const shrink = Math.max(...scaled) > long ? long / Math.max(...scaled) : 1;
    return scaled.map((side) => Math.floor(side * shrink + 0.5));
  }
  if ((high / low) * short > long) short = Math.max(1, roundHalfEven((long * low) / high));
  return sides.map((side) => (side === low ? short : Math.floor((short * side) / low)));
}

function roundHalfEven(x) {
  const down = Math.floor(x);
  return x - down === 0.5 ? down + (down % 2) : Math.round(x);
}

// RGB numbers of an image, resized bilinearly: like Pillow, which averages all pixels when it
// shrinks and rounds twice, or like OpenCV.
function resize(picture, [height, width], rules) {
  const rgb = new Float32Array(picture.width * picture.height * 3);
  for (let i = 0; i < rgb.length; i++) rgb[i] = picture.data[4 * Math.floor(i / 3) + (i % 3)];
  if (picture.height === height && picture.width === width) return rgb;
  const pillow = rules.interpolation === "PIL bilinear";
  const across = blend(rgb, picture.height, picture.width, width, 3, pillow, pillow);
  const whole = rules.rounded_to_whole_numbers;
  return blend(across, 1, picture.height, height, width * 3, pillow, whole);
}

// [outer, before, inner] numbers resized to [outer, after, inner].
function blend(values, outer, before, after, inner, average, whole) {
  const made = new Float32Array(outer * after * inner), step = before / after;
  const radius = average ? Math.max(step, 1) : 1;
  for (let to = 0; to < after; to++) {
    const center = (to + 0.5) * step, shares = [];
    const first = Math.max(0, Math.floor(center - radius));
    const last = Math.min(before - 1, Math.ceil(center + radius));
    for (let from = first; from <= last; from++) {
      shares.push(Math.max(0, 1 - Math.abs(from + 0.5 - center) / radius));
    }
    const total = shares.reduce((sum, share) => sum + share, 0);
    for (let o = 0; o < outer; o++) {
      for (let i = 0; i < inner; i++) {
        let sum = 0;
        for (let k = 0; k < shares.length; k++) {
          sum += shares[k] * values[(o * before + first + k) * inner + i];
        }
        made[(o * after + to) * inner + i] = whole ? Math.round(sum / total) : sum / total;
      }
    }
  }
  return made;
}

// The pixels of an object, of probabilities on a grid over its box.
function paste(grid, cells, [x1, y1, x2, y2], width, height) {
  const rule = manifest.postprocessing.mask_rule;
  const columns = weights(x1, x2, width, cells, rule), rows = weights(y1, y2, height, cells, rule);
  const mask = { left: columns.first, top: rows.first };
  mask.width = columns.shares.length;
  mask.height = rows.shares.length;
  mask.inside = new Uint8Array(mask.width * mask.height);
  const line = new Float32Array(cells);
  for (let y = 0; y < mask.height; y++) {
    line.fill(0);
    for (const [row, share] of rows.shares[y]) {
      for (let c = 0; c < cells; c++) line[c] += share * grid[row * cells + c];
    }
    for (let x = 0; x < mask.width; x++) {
      let value = 0;
      for (const [column, share] of columns.shares[x]) value += share * line[column];
      value = Math.fround(value);
      mask.inside[y * mask.width + x] = rule === "continuous" ? value >= 0.5 : value > 0.5;
    }
  }
  return mask;
}

// The first pixel of a side of a box, and for each of its pixels the cells of the grid with their
// shares, [[cell, share], ..].
function weights(low, high, limit, cells, rule) {
  let first, last, place;
  if (rule === "continuous") { // pixels with their centers in the box
    [first, last] = [Math.ceil(low - 0.5), Math.floor(high - 0.5)];
    place = (pixel) => ((pixel + 0.5 - low) * cells) / (high - low) - 0.5;
    if (!(high > low)) last = first - 1;
  } else { // a grid with a border of a cell, on a box that is larger by as much, in whole pixels
    const f = Math.fround, center = f(f(high + low) * 0.5);
    const half = f(f(f(high - low) * 0.5) * f((cells + 2) / cells));
    [first, last] = [Math.trunc(f(center - half)), Math.trunc(f(center + half))];
    const scale = (cells + 2) / (last + 1 - first), from = first;
    const inGrid = (cell) => Math.min(Math.max(cell, 0), cells + 1) - 1;
    place = (pixel) => inGrid((pixel - from + 0.5) * scale - 0.5);
  }
  const shares = [];
  for (let pixel = Math.max(first, 0); pixel < Math.min(last + 1, limit); pixel++) {
    const cell = place(pixel), below = Math.floor(cell);
    const both = [[below, 1 - (cell - below)], [below + 1, cell - below]];
    shares.push(both.filter(([c, share]) => c >= 0 && c < cells && share > 0));
  }
  return { first: Math.max(first, 0), shares };
}

function draw() {
  const threshold = Number(byId("threshold").value);
  byId("value").textContent = threshold.toFixed(2);
  if (!shown) return;
  const objects = shown.objects.filter((object) => object.score >= threshold);
  const { width, height, data } = shown.picture, pixels = new Uint8ClampedArray(data);
  objects.forEach(({ mask }, i) => {
    const color = COLORS[i % COLORS.length];
    for (let k = 0; mask && k < mask.inside.length; k++) {
      if (!mask.inside[k]) continue;
      const x = mask.left + (k % mask.width), y = mask.top + Math.floor(k / mask.width);
      const at = 4 * (y * width + x);
      for (let c = 0; c < 3; c++) {
        pixels[at + c] = pixels[at + c] * (1 - OPACITY) + color[c] * OPACITY;
      }
    }
  });
  const canvas = byId("canvas"), context = canvas.getContext("2d");
  [canvas.width, canvas.height, canvas.hidden] = [width, height, false];
  context.putImageData(new ImageData(pixels, width, height), 0, 0);
  context.font = "bold 14px system-ui, sans-serif";
  objects.forEach(({ box: [x1, y1, x2, y2], name }, i) => {
    context.strokeStyle = context.fillStyle = `rgb(${COLORS[i % COLORS.length]})`;
    context.lineWidth = 2;
    context.strokeRect(x1, y1, x2 - x1, y2 - y1);
    context.fillText(name, x1 + 4, y1 + 16);
  });
  const items = objects.map(({ name, score }) => {
    const item = document.createElement("li");
    item.textContent = `${name} ${score.toFixed(3)}`;
    return item;
  });
  byId("objects").replaceChildren(...items);
}

function say(error) {
  byId("status").textContent = "";
  byId("error").textContent = `Error: ${error.message || error}`;
}

byId("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) choose(file).catch(say).finally(() => { byId("file").disabled = false; });
});
byId("threshold").addEventListener("input", draw);
start().catch(say);
