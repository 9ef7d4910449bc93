"""Turns the downloaded packages into documents: Python files and plain documentation, split by package or by file."""

from __future__ import annotations

import fnmatch
import hashlib
import html.parser
import re
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).with_name("sources.toml")
LARGEST_FILE = 150_000  # bytes; longer Python files are tables or generated code
SMALLEST_FILE = 200
LARGEST_SOURCE = 8_000_000  # bytes taken of one source, so that no package dominates
VENDORED = ("_vendor", "/vendor", "third_party", "extern/", "_pb2.py", "/locale/", "/migrations/", "conf/locale")
HELD_OUT_PERCENT = 2  # of the documents of a `by_file` source


class MissingSourceError(FileNotFoundError):
    """A package that sources.toml names is not in the download folder; the message says how to get it."""


@dataclass(frozen=True)
class Source:
    """One package of sources.toml."""

    kind: Literal["pypi", "debian"]
    name: str
    version: str
    licence: str
    split: Literal["train", "held_out", "by_file"]
    include: tuple[str, ...] = ("*.py",)

    def archive(self, folder: Path) -> Path:
        """The downloaded file of this version in `folder`; raises MissingSourceError."""
        if self.kind == "pypi":
            pattern = f"{self.name.replace('-', '_')}-{self.version}-*.whl"
        else:
            pattern = f"{self.name}_{self.version.replace(':', '%3a')}_*.deb"
        found = sorted(folder.glob(pattern))
        if not found:
            raise MissingSourceError(
                f"source {self.name} {self.version} ({self.kind}) is not in {folder}: no file matches {pattern}; "
                f"run `python -m tools.hy3_tiny.fetch {folder}`"
            )
        return found[0]


@dataclass(frozen=True)
class Document:
    """One file's text, its split and kind."""

    source: str
    path: str
    text: str
    kind: Literal["code", "text"]
    split: Literal["train", "held_out"]


def load_sources(path: Path = SOURCES) -> list[Source]:
    """The sources of a sources.toml, in its order."""
    entries = tomllib.loads(path.read_text())["source"]
    return [Source(**{**e, "include": tuple(e.get("include", ("*.py",)))}) for e in entries]


class _TextOfHtml(html.parser.HTMLParser):
    """Keeps the visible text of a documentation page; preformatted blocks keep their line breaks."""

    _hidden = frozenset({"script", "style", "head", "nav", "footer"})
    _breaks = frozenset({"p", "div", "li", "tr", "dt", "dd", "h1", "h2", "h3", "h4", "pre", "br", "table", "ul", "ol"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.hidden += tag in self._hidden
        self.pre += tag == "pre"
        if tag in self._breaks:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self._hidden
        self.pre -= tag == "pre"
        if tag in self._breaks:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """The text of an HTML page with at most one blank line in a row."""
    parser = _TextOfHtml()
    parser.feed(page)
    lines = "".join(parser.parts).replace("\u00b6", "").splitlines()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"


def text_of_wordnet(data: str) -> str:
    """`word, word: gloss` for every synset of a WordNet data file."""
    entries = []
    for line in data.splitlines():
        if line.startswith("  ") or " | " not in line:
            continue
        head, gloss = line.split(" | ", 1)
        fields = head.split()
        words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
        entries.append(f"{', '.join(words)}: {gloss.strip()}\n")
    return "".join(entries)


def _documents_of_text(name: str, raw: str) -> Iterator[str]:
    if name.endswith(".html"):
        yield text_of_html(raw)
    elif "/data." in name:
        lines = text_of_wordnet(raw).splitlines(keepends=True)
        for start in range(0, len(lines), 200):
            yield "".join(lines[start : start + 200])
    else:
        yield raw


def _files(source: Source, archive: Path) -> Iterator[tuple[str, bytes]]:
    if source.kind == "pypi":
        with zipfile.ZipFile(archive) as wheel:
            for entry in sorted(wheel.namelist()):
                if any(fnmatch.fnmatch(entry, p) for p in source.include) and not any(v in entry for v in VENDORED):
                    yield entry, wheel.read(entry)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
        for path in sorted(Path(folder).rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_file() and not path.is_symlink() and any(fnmatch.fnmatch(name, p) for p in source.include):
                yield name, path.read_bytes()


def documents(source: Source, folder: Path, seen: set[bytes]) -> Iterator[Document]:
    """New documents of a source up to LARGEST_SOURCE; `seen` holds the digests of all earlier ones and is updated."""
    files = sorted(_files(source, source.archive(folder)), key=lambda f: hashlib.sha256(f[0].encode()).digest())
    taken = 0
    for name, raw in files:
        if taken > LARGEST_SOURCE:
            return
        if source.kind == "pypi" and not SMALLEST_FILE <= len(raw) <= LARGEST_FILE:
            continue
        try:
            decoded = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        for part, text in enumerate([decoded] if source.kind == "pypi" else _documents_of_text(name, decoded)):
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or len(text) < SMALLEST_FILE:
                continue
            seen.add(digest)
            taken += len(text)
            split = source.split
            if split == "by_file":
                key = hashlib.sha256(f"{source.name}/{name}/{part}".encode()).digest()
                split = "held_out" if int.from_bytes(key[:4], "big") % 100 < HELD_OUT_PERCENT else "train"
            yield Document(source.name, f"{name}#{part}", text, "code" if source.kind == "pypi" else "text", split)
