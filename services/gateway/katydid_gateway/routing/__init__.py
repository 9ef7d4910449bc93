"""Which engine gets a prompt: pure code, no I/O, time passed in."""
