"""Where tokens lie: rows, slots, positions. Index arithmetic only; knows no model."""
