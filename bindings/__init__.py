"""The binding between Python and the core."""
