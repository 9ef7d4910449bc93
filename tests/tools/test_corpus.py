"""Documents out of packages: what is taken, what is left out, what is said when one is missing."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.hy3_tiny import fetch as fetching
from tools.hy3_tiny.corpus import (
    LARGEST_FILE,
    MissingSourceError,
    Source,
    documents,
    load_sources,
    text_of_html,
    text_of_wordnet,
)


def wheel(folder: Path, files: dict[str, str]) -> Source:
    with zipfile.ZipFile(folder / "made_up-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return Source("pypi", "made-up", "1.0", "MIT", "train")


def test_a_wheel_gives_its_own_python_files_once(tmp_path: Path) -> None:
    body = "x = 1\n" * 60
    source = wheel(
        tmp_path,
        {
            "made/a.py": body,
            "made/same.py": body,
            "made/_vendor/b.py": body + "y = 2\n",
            "made/short.py": "x\n",
            "made/long.py": "x = 1\n" * LARGEST_FILE,
            "made/readme.txt": body + "z\n",
        },
    )
    found = list(documents(source, tmp_path, set()))
    assert len(found) == 1
    assert found[0].path in ("made/a.py#0", "made/same.py#0")
    assert (found[0].kind, found[0].split, found[0].text) == ("code", "train", body)


def test_a_missing_source_says_what_it_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingSourceError, match=r"source sympy 1.0 \(pypi\) .*sympy-1.0-\*.whl; run .*fetch"):
        Source("pypi", "sympy", "1.0", "BSD", "train").archive(tmp_path)
    with pytest.raises(MissingSourceError, match=r"wordnet-base_1%3a3.0-37_\*.deb"):
        Source("debian", "wordnet-base", "1:3.0-37", "WordNet", "by_file").archive(tmp_path)


def test_a_source_that_cannot_be_downloaded_ends_with_the_clients_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "command", lambda source, folder: ["sh", "-c", "echo no such package >&2; exit 3"])
    with pytest.raises(MissingSourceError, match=r"made-up 9.9 \(pypi\) cannot be downloaded: no such package"):
        fetching.fetch(Source("pypi", "made-up", "9.9", "MIT", "train"), tmp_path)


def test_every_source_has_a_version_and_a_licence_and_some_are_held_out() -> None:
    sources = load_sources()
    assert all(s.version and s.licence for s in sources)
    assert {s.split for s in sources} == {"train", "held_out", "by_file"}
    assert not any("GPL" in s.licence for s in sources)


def test_html_keeps_visible_text_and_preformatted_lines() -> None:
    page = "<html><head><title>no</title></head><body><nav>no</nav><p>Some\n  text</p><pre>a = 1\n  b = 2</pre></body>"
    assert text_of_html(page) == "Some text\n\na = 1\n  b = 2\n"


def test_wordnet_lines_become_words_and_gloss() -> None:
    line = "00001740 03 n 02 entity 0 living_thing 0 003 ~ 00001930 n 0000 | that which is perceived  \n"
    assert text_of_wordnet("  1 This software\n" + line) == "entity, living thing: that which is perceived\n"
