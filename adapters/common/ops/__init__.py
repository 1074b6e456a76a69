"""The collectives, for the arrays of any library."""
