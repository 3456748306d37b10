"""The style sheet of report pages: light, fit for print, no fonts or images from elsewhere."""

STYLE = """
:root { color-scheme:light }
body { font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; color:#1c1c1c; background:#fff;
    max-width:52rem; margin:2rem auto; padding:0 1.2rem }
h1 { font-size:1.7rem; margin:0 }
header p { color:#555; margin:.2rem 0 1.2rem }
h2 { font-size:1.15rem; margin:2rem 0 .6rem; border-bottom:1px solid #ccc; padding-bottom:.2rem }
h3 { font-size:.95rem; margin:.8rem 0 .3rem }
.tiles { display:grid; grid-template-columns:repeat(3,1fr); gap:.6rem; margin:0 }
.tiles div { border:1px solid #ccc; border-radius:6px; padding:.5rem .8rem; overflow-wrap:anywhere }
.tiles dt { color:#555; font-size:.8rem }
.tiles dd { margin:0; font-size:1.1rem; font-weight:600 }
.tiles .good { border-color:#00735c; background:#eef8f5 }
.tiles .warn { border-color:#b26a00; background:#fff6e5 }
.tiles .bad { border-color:#b3261e; background:#fdeeee }
p.bad { color:#b3261e; font-weight:600 }
.lead { margin:.9rem 0 0 }
blockquote { margin:.3rem 0 1rem; padding:.5rem .9rem; border-left:3px solid #888; background:#f6f6f6;
    font-size:.88rem }
table { border-collapse:collapse; width:100%; font-size:.88rem; margin:.4rem 0 }
th,td { text-align:left; padding:.28rem .7rem .28rem 0; border-bottom:1px solid #e3e3e3; vertical-align:top }
td:first-child { white-space:nowrap }
td:last-child { overflow-wrap:anywhere }
thead th { color:#555; font-weight:600; white-space:nowrap }
.facts th { font-weight:400; color:#555; width:17rem }
.facts td { font-variant-numeric:tabular-nums }
.small,figcaption { font-size:.8rem; color:#555 }
figure { margin:1rem 0; break-inside:avoid }
svg { width:100%; height:auto; display:block }
svg text { font:11px system-ui,sans-serif }
.tick { fill:#555 }
.grid { stroke:#e6e6e6; fill:none }
.band { fill:#0072b2; fill-opacity:.16 }
.mean { stroke:#0072b2; stroke-width:2; fill:none }
.alpha { stroke:#1c1c1c; stroke-width:1.3; fill:none }
.red { stroke:#b3261e; stroke-width:1.3; stroke-dasharray:6 4; fill:none }
code { font-size:.75rem; overflow-wrap:anywhere }
footer { margin-top:2.5rem; color:#555; font-size:.8rem; border-top:1px solid #ccc; padding-top:.5rem }
@page { margin:18mm 16mm }
@media print {
  body { margin:0; max-width:none; padding:0; font-size:10.5pt }
  h2,h3 { break-after:avoid }
  tr,blockquote,.tiles { break-inside:avoid }
  * { print-color-adjust:exact; -webkit-print-color-adjust:exact }
}
@media(max-width:34rem) {
  .tiles { grid-template-columns:1fr 1fr }
  .facts th { width:9rem }
}
"""
