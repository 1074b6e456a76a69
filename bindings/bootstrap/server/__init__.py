"""The server side of the rendezvous, and the collectors of hosts in front of it."""
