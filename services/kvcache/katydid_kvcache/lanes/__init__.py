"""Blocks between hosts at the speed of the wire: bulk lanes out of the arena, and pulls from other instances into it."""
