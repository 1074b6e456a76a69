"""The binding between Python and the core: load, marshal, call, check; and bootstrap, which finds the peers."""
