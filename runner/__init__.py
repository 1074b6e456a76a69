"""hvdrun: starts the ranks of a job, shows their output, and ends them together."""
