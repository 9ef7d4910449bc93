"""Blocks between hosts at the speed of the wire: bulk lanes out of the arena, pulls from other instances into it."""
