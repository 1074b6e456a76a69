"""Ranks in the processes of an engine, such as Spark or Ray, which starts and ends them itself."""
