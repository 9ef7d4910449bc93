"""`katydid bench`: open-loop load against a gateway, and what came of it."""
