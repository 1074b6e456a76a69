"""The folder that a spare has first on its PYTHONPATH, for its module `sitecustomize` alone."""
