"""The styles and the script of pages: light or dark as the reader's system is, plain on paper.

Colors are those of the pictures (pictures.py): temperature 0 is a blue circle, temperature 1 an amber diamond. Color-blind readers can tell
them apart, and no information is in a color alone: shapes show it too.
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1b2025; --soft: #56606a; --line: #d8dce0; --fill: #f1f3f4;
  --cold: #0b4f8a; --warm: #9a4d00; --plain: #6b747c; --good: #1d6b3c; --bad: #a3271b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e7eaed; --soft: #a6b0ba; --line: #343c44; --fill: #1d2329;
  --cold: #82bdf2; --warm: #f0b160; --plain: #98a2ab; --good: #7fd19d; --bad: #ff9a8d; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: 1rem; background: var(--paper); padding: .5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .3rem; letter-spacing: -.005em; }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
section { border-top: 1px solid var(--line); padding: 1.5rem 0 .5rem; margin-top: 1.5rem; }
section:first-child { border-top: 0; padding-top: .4rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; }
.lead { font-size: 1.13rem; } .soft, figcaption, caption { color: var(--soft); } .small { font-size: .875rem; }
a { color: var(--cold); }
:focus-visible { outline: 2px solid var(--cold); outline-offset: 2px; border-radius: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem 1.2rem; margin: 1.2rem 0 0; padding: 0; }
.tiles > div { border-left: 3px solid var(--line); padding-left: .8rem; }
.tiles > .t0 { border-color: var(--cold); } .tiles > .t1 { border-color: var(--warm); }
.tiles dt { color: var(--soft); font-size: .875rem; } .tiles dd { margin: 0; font-size: .875rem; color: var(--soft); }
.tiles dd.big { font-size: 1.75rem; line-height: 1.3; font-weight: 600; letter-spacing: -.02em; color: var(--ink); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); gap: 1.6rem 2.4rem; align-items: start; }
figure { margin: .6rem 0 0; } figcaption { font-size: .875rem; margin-bottom: .35rem; max-width: 46rem; }
svg { display: block; width: 100%; height: auto; max-width: 32rem; overflow: visible; } svg.wide { max-width: 56rem; }
svg text { font-size: 12px; fill: var(--soft); } svg text.name { fill: var(--ink); } svg .grid { stroke: var(--line); }
svg text.t0 { fill: var(--cold); font-weight: 600; } svg text.t1 { fill: var(--warm); font-weight: 600; }
svg .t0.line { stroke: var(--cold); } svg .t1.line { stroke: var(--warm); } svg .plain.line { stroke: var(--plain); }
svg .line { fill: none; stroke-width: 2; } svg .thin { stroke-width: 1; opacity: .75; } svg .dash { stroke-dasharray: 5 4; }
svg .band.t0 { fill: var(--cold); } svg .band.t1 { fill: var(--warm); } svg .band { opacity: .14; }
svg .dot.t0 { fill: var(--cold); } svg .dot.t1 { fill: var(--warm); } svg .dot.plain { fill: var(--plain); }
svg .dot { stroke: var(--paper); stroke-width: 1; } svg .hollow { fill: var(--paper); stroke-width: 1.6; }
svg .hollow.plain { stroke: var(--plain); } svg .lead-line { stroke: var(--soft);
  stroke-width: .7; }
.scroll { overflow-x: auto; } .scroll svg.wide { min-width: 38rem; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; } table + table { margin-top: 1.4rem; }
caption span { display: block; max-width: min(46rem, calc(100vw - 2.5rem)); }
caption { text-align: left; padding-bottom: .4rem;
  font-size: .875rem; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
thead th, thead .n { white-space: normal; }
thead th { color: var(--soft); font-weight: 500; font-size: .82rem; vertical-align: bottom; }
tbody th { font-weight: 500; text-wrap: balance; }
.n { text-align: right; white-space: nowrap; } td.value { overflow-wrap: anywhere;
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .84rem; }
.scroll tbody th { position: sticky; left: 0; background: var(--paper); white-space: nowrap; }
table.tight th, table.tight td { padding-right: .55rem; } table.tight { font-size: .84rem; width: auto; min-width: 70%; }
table.tight .bar { width: 16%; }
.bar { min-width: 9rem; width: 40%; } .bar span { display: block; height: .8rem; border-radius: 1px; background: var(--plain); }
.bar .t0 { background: var(--cold); } .bar .t1 { background: var(--warm); }
.parts { display: flex; height: 1.7rem; margin: .5rem 0 .2rem; } .parts span { border-right: 2px solid var(--paper); }
.parts .a { background: var(--plain); } .parts .b { background: var(--cold); } .parts .c { background: var(--warm); }
.parts .d { background: var(--line); } .key { display: inline-block; width: .7rem; height: .7rem; margin-right: .45rem; }
.key.a { background: var(--plain); } .key.b { background: var(--cold); } .key.c { background: var(--warm); }
  .key.d { background: var(--line); }
td.heat { text-align: right; background: color-mix(in srgb, var(--cold) calc(var(--p) * 52%), transparent); padding: .32rem .5rem; }
.note { border-left: 3px solid var(--warm); padding: .1rem 0 .1rem .9rem; } .ok { color: var(--good); } .bad { color: var(--bad);
  font-weight: 600; }
details { margin: .5rem 0; } summary { cursor: pointer; } summary:hover { color: var(--cold); }
pre { font: .84rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.code { background: var(--fill); padding: .7rem .9rem; } .text { border: 1px solid var(--line); margin: 0; }
.text figcaption { padding: .55rem .9rem 0; margin: 0; } .text pre { padding: .5rem .9rem .8rem; line-height: 1.7; }
.text:hover .said, .text:focus-within .said { position: sticky; bottom: 0; }
.said { background: var(--fill); margin: 0; padding: .5rem .9rem; font-size: .875rem; max-width: none;
  min-height: 4.2rem; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
.r { border-radius: 2px; } .r:hover, .r.here { outline: 1.5px solid var(--ink); outline-offset: 1px; }
.r b, .legend b { font-weight: inherit; background: color-mix(in srgb, var(--cold) calc(10% + var(--q, .5) * 34%), transparent); }
.r del, .legend del { color: var(--warm); background: color-mix(in srgb, var(--warm) 11%, transparent); font-size: .92em;
  margin-right: 1px; }
.text u, .legend u { text-decoration: underline dotted; text-decoration-color: var(--soft); text-underline-offset: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; padding: 0; margin: .3rem 0 .9rem; list-style: none; font-size: .9rem; }
.dim { color: var(--soft); }
dl.about { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0; font-size: .9rem; }
dl.about dt { color: var(--soft); } dl.about dd { margin: 0; overflow-wrap: anywhere; }
footer { padding: 1rem 1.25rem 3rem; color: var(--soft); font-size: .875rem; }
@media (max-width: 36rem) { header { padding-top: 1.4rem; } h1 { font-size: 1.5rem; } dl.about { grid-template-columns: 1fr; gap: 0; }
  dl.about dd { margin-bottom: .5rem; } .bar { min-width: 2.5rem; width: 20%; } th, td { padding-right: .6rem; } }
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --fill: #f2f2f2; --cold: #0b4f8a;
  --warm: #8a4500; --plain: #777; } body { font-size: 10pt; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .skip, .said, .screen { display: none; } figure, tr, .tiles > div { break-inside: avoid; } .text { break-inside: auto; }
  h2 { break-after: avoid; } .scroll { overflow: visible; } header, main, footer { max-width: none; padding: 0; } }
"""

# The line below a text tells what was guessed in one round: the one under the pointer, or the one chosen with the arrow keys. Before
# printing, all folded parts are opened.
SCRIPT = """
"use strict";
for (const text of document.querySelectorAll(".text")) {
  const said = text.querySelector(".said"), pre = text.querySelector("pre"), rounds = [...pre.querySelectorAll(".r")];
  let here = -1;
  const show = (i) => {
    if (i < 0 || i >= rounds.length || i === here) return;
    if (here >= 0) rounds[here].classList.remove("here");
    here = i; rounds[i].classList.add("here"); said.textContent = rounds[i].dataset.said;
  };
  pre.addEventListener("mouseover", (event) => show(rounds.indexOf(event.target.closest(".r"))));
  pre.addEventListener("click", (event) => show(rounds.indexOf(event.target.closest(".r"))));
  pre.addEventListener("focus", () => { if (here < 0 && pre.matches(":focus-visible")) show(0); });
  pre.addEventListener("keydown", (event) => {
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: rounds.length - 1 }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;  // Alt and an arrow is the browser's own
    event.preventDefault(); show(to); rounds[here]?.scrollIntoView({ block: "nearest" });
  });
}
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
"""
