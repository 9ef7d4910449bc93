"""Everything between text and token ids."""
