"""docs/api.md says what the code serves: `python scripts/api_page.py` writes it."""

from __future__ import annotations

from scripts.api_page import ENDPOINTS, PAGE, page, routes


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python scripts/api_page.py"


def test_every_route_of_the_gateway_is_on_it() -> None:
    assert {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS} == routes()
