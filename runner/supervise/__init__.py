"""The supervision of a running job: its output, its signals, and who caused its failure."""
