"""Rendezvous and authentication of a job's ranks. Pure Python: nothing here loads the core library."""
