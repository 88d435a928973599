"""Our training step beside other people's: cases, the processes that build and time them, and the page.

It uses attnbench's jobs, rows, tables and pages; nothing of attnbench knows of it.
"""
