"""How the ranks of a job find and recognise each other. Pure Python: nothing here loads the core library."""
