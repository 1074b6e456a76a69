"""The room where the processes of a job start, find and recognise each other, and become ranks."""
