"""hvdrun as the driver of an elastic job: starts workers, and decides who is a rank of which generation."""
