"""The shared store below memory and disk: blocks that several instances write and find."""
