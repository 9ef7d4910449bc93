"""Who goes next when there is more work than the engines can take: budgets, a fair queue, and the gate before them."""
