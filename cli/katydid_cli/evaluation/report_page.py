"""Puts what was measured into the page that lies beside a quantised model's weights."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from katydid_cli.evaluation.report import Result, rows

__all__ = ["PAGE", "add_to_page"]

PAGE = "quantization-report.html"
_SECTION = re.compile(r'<section id="evaluation">.*?</section>\n', re.S)


def add_to_page(folder: Path, results: Sequence[Result]) -> bool:
    """Writes the table into the folder's page, in the place of an earlier one; False where there is no page."""
    path = folder / PAGE
    if not path.is_file():
        return False
    page = _SECTION.sub("", path.read_text(encoding="utf-8"))
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(page + _section(results), encoding="utf-8")
    unfinished.rename(path)
    return True


def _section(results: Sequence[Result]) -> str:
    header, body = rows(results)
    lines = [_line("th", header), *(_line("td", line) for line in body)]
    return (
        '<section id="evaluation"><h2>Evaluation</h2><p>Behind the first configuration: what is lost against it on the '
        f"same items, with a 95 % interval.</p><table>{''.join(lines)}</table></section>\n"
    )


def _line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
