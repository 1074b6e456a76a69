"""The ranks of `sirtaki bench`: operations on numpy arrays through sirtaki and its peers."""
