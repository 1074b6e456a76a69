"""Steps that do not wait for ranks that are late."""
