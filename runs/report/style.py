"""Style a report: light or dark as the reader's system is, from a phone to a wide screen."""

STYLE = """
:root { --paper: #fff; --ink: #1a1c1f; --soft: #565b63; --rule: #d9dce1; --card: #f6f7f9;
  --c0: #0b57c2; --c1: #b34700; --c2: #0a7350; --c3: #8330b0; --c4: #a1253f; --c5: #5c5400; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #eceef1; --soft: #a9b0ba;
  --rule: #363b44; --card: #1d2026;
  --c0: #7fb2ff; --c1: #ffab70; --c2: #63d3a4; --c3: #d5a6ff; --c4: #ff9aac; --c5: #ddd06a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2rem;
  overflow-wrap: anywhere; }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figcaption { font-weight: 600; } .unit { font-weight: 400; color: var(--soft); }
figure > svg { display: block; width: 100%; height: auto; max-width: 640px; }
figure.broad > svg { max-width: none; }
svg text { font: 15px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); } .resumed { stroke: var(--soft); stroke-dasharray: 3 3; stroke-width: 1.5; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { stroke: var(--card); stroke-width: 1; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0; padding: 0; list-style: none;
  font-size: .875rem; overflow-wrap: anywhere; }
.sample { width: 36px; height: 12px; margin-right: 6px; vertical-align: middle; }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; min-width: 5em; }
thead th { overflow-wrap: normal; }
tbody th { font-weight: 400; color: var(--soft); overflow-wrap: break-word; }
.numbers th, .numbers td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.lines td, .lines th { white-space: nowrap; min-width: 0; overflow-wrap: normal; }
.lines .text { white-space: normal; min-width: 18em; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
@media print { details > * { display: block; } }
"""
