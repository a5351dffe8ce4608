"""The HTML of a report: one file, dark and light by the reader's setting, for screens, phones and paper.

Every text is escaped: names, reasons and warnings come from peers.
"""

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Final

from fanin.commands.report.charts import chart_html
from fanin.commands.report.content import Content, Grid
from fanin.protos.release import __version__

MARK: Final = "<!-- fanin report -->"
"""The second line of a report, by which the next one knows that it may replace the file."""
MAX_COLUMNS: Final = 6
"""Figures in one row; more are in two rows."""


def page_html(content: Content, now_s: float) -> str:
    """Return the page. ``now_s`` is the time at which it is written, in seconds since the Unix epoch."""
    style = (files("fanin.commands.report") / "report.css").read_text("utf-8")
    written = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    good = "good" if content.is_good else "bad"
    reason = f"<p class=reason>{escape(content.reason)}</p>" if content.reason else ""
    figures = "".join(
        f"<div class=figure><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in content.figures
    )
    num = len(content.figures)
    columns = num if num <= MAX_COLUMNS else (num + 1) // 2
    warnings = "".join(f"<li>{escape(text)}</li>" for text in content.warnings)
    charts = "".join(map(chart_html, content.charts))
    return f"""<!doctype html>
{MARK}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(content.name)} - fanin</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<p class=kind>fanin {escape(content.kind)}</p>
<h1>{escape(content.name)} <span class="state {good}">{escape(content.state)}</span></h1>
{reason}
</header>
<dl class=figures style="--columns: {columns}">{figures}</dl>
{f"<section class=warnings><h2>Warnings</h2><ul>{warnings}</ul></section>" if warnings else ""}
<section class=charts>{charts}</section>
{"".join(map(_table, content.tables))}
<footer>Written {written} by fanin {escape(__version__)}</footer>
</main>
</body>
</html>
"""


def _table(table: Grid) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in table.head)
    first = "th scope=row" if not table.head else "td"
    rows = "".join(
        "<tr>"
        f"<{first}>{escape(row[0])}</{first.partition(' ')[0]}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    kind = "numbers" if table.head else "facts"
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    thead = f"<thead><tr>{head}</tr></thead>" if head else ""
    return (
        f"<section><h2>{escape(table.title)}</h2>{note}<div class=scroll tabindex=0>"
        f"<table class={kind}>{thead}<tbody>{rows}</tbody></table></div></section>"
    )
