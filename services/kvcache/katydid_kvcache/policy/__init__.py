"""Which blocks stay: pure rules that know keys and sizes and do no I/O."""
