"""hvdrun: starts the ranks of a job, shows what they say, and ends them together."""
