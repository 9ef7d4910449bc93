"""The disk tier: segment files of fixed slots, and an index in LMDB that is committed after the data."""
