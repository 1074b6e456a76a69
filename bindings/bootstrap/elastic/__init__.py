"""A process as a worker of an elastic job: it lives through several worlds, which hvdrun forms."""
