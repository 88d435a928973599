"""The doctor: fast forms compared with their definitions (see mixers/definition.py) on this device."""
