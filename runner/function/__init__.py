"""`sirtaki.run`: calls a function on every rank of a job, and returns the results."""
