"""Each rank's share of the data."""
