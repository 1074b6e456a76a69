"""The command lines of hvdrun and sirtaki: options, their files, and the command that ranks run."""
