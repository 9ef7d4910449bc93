"""Models a laptop can get without a hub: list them, prepare one into a cache directory, verify what lies there."""

from __future__ import annotations

from katydid_cli.models.catalogue import CATALOGUE, CatalogueEntry, ModelListing, list_models
from katydid_cli.models.prepare import prepare
from katydid_cli.models.verify import VerifyReport, verify

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelListing", "VerifyReport", "list_models", "prepare", "verify"]
