"""Fast forms held against definitions, on this device."""
