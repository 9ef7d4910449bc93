"""`katydid trace`: one request's spans as a tree, and what its time to first token went into."""
