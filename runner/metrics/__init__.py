"""hvdrun --metrics-port: one endpoint for Prometheus on each host of a job."""
