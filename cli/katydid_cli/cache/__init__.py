"""`katydid cache`: what operators see and do of running KV-cache services."""
