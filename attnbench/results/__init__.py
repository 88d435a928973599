"""Results on disk: rows, files, folders, identities, jobs, tables and published pages.

Everything here can be read and written without a device; nothing here judges a number.
"""
