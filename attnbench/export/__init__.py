"""Models for other programs: a folder for Hugging Face's transformers, a model class for lm-evaluation-harness.

Exported code is derived from the package's own files by rules (torch_form.py, sources.py): a new mixer needs no line
here.
"""
