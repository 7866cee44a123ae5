"""One page without links to other files, in light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

LIGHT = (
    "#4269d0", "#a463f2", "#6b3fa0", "#3ca951", "#97bbf5", "#9498a0", "#ff8ab7", "#efb118", "#d6cfc4", "#ff725c",
    "#e2453c", "#b3202c", "#9c6b4e", "#2f7f79", "#6cc5b0", "#c9ccd1",
)  # fmt: skip
STYLE = """:root{color-scheme:light dark;--ink:#1b1e23;--soft:#5b616b;--page:#fff;--rule:#dfe3e8}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a3a9b3;--page:#16181c;--rule:#333840}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2.2rem}p,li{max-width:50rem}.soft{color:var(--soft)}
svg{width:100%;height:auto;display:block;margin:.6rem 0}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.roof{stroke:var(--soft);stroke-width:1.5}.line{fill:none;stroke:#4269d0;stroke-width:1.5}circle{fill-opacity:.65}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}td,th{padding:.2rem .6rem;text-align:right;
border-bottom:1px solid var(--rule)}td:first-child,th:first-child{text-align:left}.scroll{overflow-x:auto}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}.key{display:inline-block;width:.8em;height:.8em;
margin-right:.4em;border-radius:2px}""" + "".join(
    f".c{number}{{fill:{value};background:{value}}}" for number, value in enumerate(LIGHT)
)


def document(parts: Iterable[str]) -> str:
    """The page of a report from its parts, in HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Strata profile</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
