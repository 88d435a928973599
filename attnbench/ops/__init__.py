"""The recurrences of mixers as operators."""
