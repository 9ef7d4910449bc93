"""How many engines of each role there should be: signals, and the plan made of them, without a clock or a network."""
