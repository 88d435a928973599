"""Fast forms held against definitions on this very device: the doctor's checks and its page.

The comparison itself is mixers/definition.py, which tests and the gate of the benches use too; nothing here measures a
speed but the first training step.
"""
