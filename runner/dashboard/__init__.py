"""hvdrun --dashboard: a page in the browser with the ranks of this host, while a job runs."""
