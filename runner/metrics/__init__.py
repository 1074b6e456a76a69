"""hvdrun --metrics-port: an endpoint for Prometheus on each host of a job."""
