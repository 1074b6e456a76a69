"""The neutral layer: what every framework's adapter shares, and nothing of any framework."""
