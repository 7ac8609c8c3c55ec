"""Stylesheet of the report, and its only script, which sorts tables."""

STYLE = """
:root{color-scheme:light dark;
--page:#fff;--text:#1d2125;--soft:#626a73;--line:#e2e5e9;--wash:#f5f6f8;
--blue:30 102 176;--amber:196 98 12;--mark:#1d2125}
@media (prefers-color-scheme:dark){:root{
--page:#15181c;--text:#e4e7ea;--soft:#98a1ab;--line:#2d333a;--wash:#1d2126;
--blue:104 170 238;--amber:240 150 70;--mark:#e4e7ea}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2.5rem 1.25rem 5rem;max-width:70rem;background:var(--page);
color:var(--text);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{margin:0;font-size:1.65rem;line-height:1.25;font-weight:650;letter-spacing:-.01em}
h2{margin:0 0 .35rem;font-size:1.2rem;font-weight:650;line-height:1.3}
h3{margin:0 0 .3rem;font-size:1rem;font-weight:600}
p{margin:0 0 .9rem;max-width:46rem}
.soft,figcaption,caption{color:var(--soft)}
section{margin-top:3.25rem;scroll-margin-top:1rem}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;margin-top:1.2rem;padding:.55rem 0;
border:solid var(--line);border-width:1px 0;font-size:.92rem}
a{color:rgb(var(--blue));text-decoration:none}
a:hover,a:focus-visible{text-decoration:underline}
dl{display:flex;flex-wrap:wrap;gap:.15rem 1.6rem;margin:.7rem 0 0;font-size:.92rem}
dl div{display:flex;gap:.45rem}
dt{color:var(--soft)}
dd{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem}
.tile{display:grid;grid-template-columns:1.4fr 1fr 1fr;gap:.9rem;align-items:end;
padding:1rem 1.2rem;border-radius:.6rem;background:var(--wash)}
.tile h3{grid-column:1/-1;margin:0;color:var(--soft);font-size:.9rem;font-weight:500}
.tile span{display:block;color:var(--soft);font-size:.85rem}
.tile b{display:block;font-size:1.5rem;font-weight:600;line-height:1.15}
.tile div:first-of-type b{font-size:2.5rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));
gap:1.5rem 2.5rem}
.charts.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr))}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12px}
svg .key{fill:var(--text);font-weight:600}
.grid,.axis{fill:none;stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft)}
.line,.line2{fill:none;stroke:rgb(var(--blue));stroke-width:1.75;stroke-linejoin:round}
.line2{stroke:rgb(var(--amber))}
circle.line{fill:rgb(var(--blue))}
circle.line2{fill:rgb(var(--amber))}
.mark{stroke:var(--mark);stroke-width:1.25;stroke-dasharray:3 3}
.true{fill:rgb(var(--blue));background:rgb(var(--blue))}
.false{fill:rgb(var(--amber));background:rgb(var(--amber))}
.row{display:flex;flex-wrap:wrap;gap:1rem;align-items:flex-start}
.row>*{max-width:100%;flex:0 1 auto}
.scroll{overflow:auto;max-height:38rem;border:1px solid var(--line);border-radius:.5rem}
.scroll.free{max-height:none;padding:0 .5rem .5rem 0}
table{border-collapse:separate;border-spacing:0;font-size:.92rem}
.plain{width:100%}
caption{padding:.5rem .75rem;text-align:left;font-size:.9rem}
th,td{padding:.36rem .75rem;text-align:right;font-weight:400;white-space:nowrap}
.plain td,.plain tbody th{border-top:1px solid var(--line)}
th:first-child{text-align:left;white-space:normal;min-width:8rem}
thead th{color:var(--soft);font-weight:500}
.plain thead th{position:sticky;top:0;background:var(--wash)}
button{all:unset;cursor:pointer;white-space:nowrap}
button:focus-visible{outline:2px solid rgb(var(--blue));outline-offset:3px;border-radius:2px}
button::after{content:"";display:inline-block;width:.9em;text-align:right}
[aria-sort=ascending] button::after{content:"\\2191"}
[aria-sort=descending] button::after{content:"\\2193"}
.bar{background:linear-gradient(rgb(var(--blue)/.22),rgb(var(--blue)/.22)) no-repeat
.5rem 50%/calc((100% - 1rem)*var(--w)) calc(100% - .6rem)}
.confusion{font-size:.85rem;border-spacing:2px}
.confusion td,.confusion thead td{width:2.6rem;min-width:2.6rem;height:1.9rem;padding:0 .25rem;
text-align:center;background:var(--wash);border-radius:2px}
.confusion thead td{background:none}
.confusion th{padding:.1rem .5rem;text-align:right;max-width:12rem;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
.confusion thead th{writing-mode:vertical-rl;transform:rotate(180deg);min-width:0;max-height:9rem;
padding:.4rem 0;text-align:left;vertical-align:bottom}
.confusion tbody th{position:sticky;left:0;background:var(--page);min-width:0}
.dense{font-size:.62rem;line-height:1;border-spacing:1px}
.dense td,.dense thead td{width:.66rem;min-width:.66rem;height:.66rem;padding:0;font-size:0}
.dense tbody th{padding:0 .35rem 0 0}
.dense thead th{width:.66rem;max-width:.66rem;padding:0;line-height:.66rem;font-size:.6rem}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));
gap:1.75rem 1.5rem}
figure{margin:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:3px;align-items:start}
.pair img{display:block;width:100%;aspect-ratio:1;object-fit:contain;border-radius:.3rem;
background:var(--wash)}
.absent{padding:2.5rem 1rem;border:1px dashed var(--line);border-radius:.3rem;text-align:center;
color:var(--soft);font-size:.9rem}
figcaption{margin-top:.4rem;font-size:.9rem;line-height:1.4}
figcaption b{color:var(--text);font-weight:600}
.swatch{display:inline-block;width:.75em;height:.75em;margin:0 .2em;border-radius:2px}
footer{margin-top:4rem;padding-top:1rem;border-top:1px solid var(--line);color:var(--soft);
font-size:.85rem}
@media (max-width:30rem){body{padding:1.4rem 1rem 3rem}section{margin-top:2.5rem}
.tile{padding:.8rem .9rem}.tile b{font-size:1.25rem}.tile div:first-of-type b{font-size:2rem}
th,td{padding:.36rem .5rem}th:first-child{min-width:6rem}svg text{font-size:13px}}
@media print{.scroll{max-height:none;border:0}nav{display:none}}
"""

# Nine shades of confusion cells: c for correct, w for wrong.
STYLE += "".join(
    f".confusion .{kind}{level}{{background:rgb(var(--{color})/{0.2 + 0.08 * level:.2f})"
    f"{';color:var(--page)' if level > 5 else ''}}}"
    for kind, color in (("c", "blue"), ("w", "amber"))
    for level in range(1, 10)
)

# A click sorts by the column, a second click reverses; cells without a value stay last.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const value = (row, column) => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? parseFloat(cell.dataset.v) : cell.textContent;
  };
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = table.tBodies[0];
      const text = head.cellIndex === 0;
      const up = head.ariaSort ? head.ariaSort === "descending" : text;
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const compare = (a, b) => {
        const x = value(a, head.cellIndex), y = value(b, head.cellIndex);
        if (text) return up ? x.localeCompare(y) : y.localeCompare(x);
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return up ? x - y : y - x;
      };
      body.append(...[...body.rows].sort(compare));
    });
  }
}
"""
