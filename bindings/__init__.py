"""The binding between Python and the core; and bootstrap, which finds the peers."""
