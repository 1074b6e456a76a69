"""The start of a job: hosts, environment, folder, and the processes of ranks."""
