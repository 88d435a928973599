"""Models that leave: a folder for Hugging Face's transformers, a model class for lm-evaluation-harness.

What trained a model is read here, never changed. What is copied into an exported folder is made from the package's own
files by a rule (torch_form.py, sources.py), so that a new mixer is exported without a line here.
"""
