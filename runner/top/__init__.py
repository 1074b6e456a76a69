"""`sirtaki top`: a job's ranks, once a second."""
