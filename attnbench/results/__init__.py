"""What was measured, on disk: rows, files, folders, identities, tables."""
