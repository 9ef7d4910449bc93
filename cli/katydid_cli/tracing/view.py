"""The `katydid trace` command: the tree with bars on a common time axis, then the TTFT by phase."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from katydid_runtime.errors import NotFoundError, SettingsError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from katydid_cli.tracing.attribution import Attribution, attribute
from katydid_cli.tracing.spans import Node, Span, choose_trace, read_spans, tree

__all__ = ["trace"]

_BAR_WIDTH = 32
_NARROWEST_BAR = 10
_PIPE_WIDTH = 240  # a file or a pager takes whole lines
_MS_WIDTH = 9
_PHASE_COLUMNS = 32  # phase, ms and share, with the gaps between
_COLOURS = {"gateway": "cyan", "engine": "green", "kvcache": "magenta"}
_SHOWN_ATTRIBUTES = 4


def trace(paths: Sequence[Path], wanted: str | None, console: Console | None = None) -> None:
    """Print the trace `wanted`, or of the request that ended last, out of files or folders of *.jsonl files.

    Raises SettingsError for unreadable paths, NotFoundError when the trace is not among them.
    """
    console = console or _console()
    spans, broken = read_spans(_files(paths))
    chosen = choose_trace(spans, wanted)
    services = sorted({span.service for span in chosen})
    console.print(f"trace {chosen[0].trace_id}: {len(chosen)} spans of {', '.join(services)}", soft_wrap=True)
    console.print(_tree_table(chosen, console.width))
    if broken:
        console.print(f"{broken} lines were no spans", style="yellow")
    try:
        attribution = attribute(chosen)
    except NotFoundError as error:
        console.print(str(error), style="yellow", soft_wrap=True)
        return
    console.print(_attribution_table(attribution, console.width))
    if attribution.waited_for:
        names = ", ".join(f"{_full_name(span)} ({span.duration_s * 1e3:.1f} ms)" for span in attribution.waited_for)
        console.print(f"the first token waited for {names}", soft_wrap=True)
    if attribution.tpot_s is not None:
        console.print(f"TPOT {attribution.tpot_s * 1e3:.1f} ms")


def _console() -> Console:
    """As wide as the terminal, or as COLUMNS says; without either wide enough for the attributes."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise SettingsError(f"{path} holds no *.jsonl files", value=str(path))
        files += found
    return files


def _tree_table(spans: Sequence[Span], width: int) -> Table:
    """A row a span. Attributes get the width that is left, and are cut rather than wrapped."""
    begin = min(span.start_ns for span in spans)
    length = max(1, max(span.end_ns for span in spans) - begin)
    rows = [row for root in tree(spans) for row in _rows(root, "", "")]
    name_width = max(name.cell_len for name, _ in rows)
    names = {span.span_id: _full_name(span) for span in spans}
    left = max(0, width - name_width - _MS_WIDTH - 4)
    bar_width = min(_BAR_WIDTH, max(_NARROWEST_BAR, left // 2))
    note_width = max(0, left - bar_width)

    table = Table(box=None, pad_edge=False)
    table.add_column("span", no_wrap=True, min_width=name_width)
    table.add_column("ms", no_wrap=True, min_width=_MS_WIDTH, justify="right")
    table.add_column("", no_wrap=True, min_width=bar_width)
    table.add_column("", no_wrap=True)
    for name, span in rows:
        bar = Text(_bar(span, begin, length, bar_width), _COLOURS.get(span.service, "white"))
        table.add_row(name, f"{span.duration_s * 1e3:.1f}", bar, Text(_note(span, names)[:note_width], "dim"))
    return table


def _rows(node: Node, indent: str, branch: str) -> Iterator[tuple[Text, Span]]:
    """The node's name with the lines that lead to it, then its children's."""
    name = Text(indent + branch, "dim").append(node.span.name, _COLOURS.get(node.span.service, "white"))
    if node.span.error:
        name.append(" ✗", "bold red")
    yield name, node.span
    below = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for child in node.children:
        yield from _rows(child, below, "└─ " if child is node.children[-1] else "├─ ")


def _bar(span: Span, begin: int, length: int, columns: int) -> str:
    left = int((span.start_ns - begin) / length * columns)
    width = max(1, round((span.end_ns - span.start_ns) / length * columns))
    return (" " * min(left, columns - 1) + "█" * width)[:columns].ljust(columns)


def _full_name(span: Span) -> str:
    """With the tier of a fetch: there is a span for each."""
    return " ".join((span.name, *filter(None, (span.attributes.get("katydid.tier"),))))


def _note(span: Span, names: Mapping[str, str]) -> str:
    """The error, or what the span is linked to, then attributes; `names` are those of the trace's spans by id."""
    if span.error:
        return span.error
    links = ", ".join(names.get(link, "a span elsewhere") for link in span.links)
    hidden = ("ttft", "katydid.request_id", "request.id")
    shown = [(key, value) for key, value in span.attributes.items() if not key.startswith(hidden)]
    attributes = (f"{key}={value}" for key, value in shown[:_SHOWN_ATTRIBUTES])
    return " ".join((*((f"→ {links}",) if links else ()), *attributes))


def _attribution_table(attribution: Attribution, width: int) -> Table:
    bar_width = min(_BAR_WIDTH, max(_NARROWEST_BAR, width - _PHASE_COLUMNS))
    table = Table(f"TTFT {attribution.ttft_s * 1e3:.1f} ms", "ms", "share", "", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, seconds in attribution.phases_s.items():
        share = seconds / attribution.ttft_s if attribution.ttft_s > 0 else 0.0
        bar = "█" * max(0, round(share * bar_width))
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{share:.1%}", Text(bar, "blue"))
    return table
