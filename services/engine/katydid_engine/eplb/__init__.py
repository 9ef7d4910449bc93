"""Balancing experts over ranks: which expert gets copies, where they lie, and how they get there while requests run."""
