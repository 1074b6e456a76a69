"""The arbiter of an elastic job, without I/O: its model, its policy, and its orders."""
