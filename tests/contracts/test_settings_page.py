"""docs/settings.md lists the settings the services have: `python scripts/settings_page.py` writes it."""

from __future__ import annotations

from scripts.settings_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python scripts/settings_page.py"
