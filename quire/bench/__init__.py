"""The load generator behind `quire bench serve`. It imports no model code."""
