"""Connections between processes of a job: addresses, the handshake, keys, encryption and frames."""
