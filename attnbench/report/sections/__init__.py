"""Contents of a report: the answer, a section for each question, and the words of all."""
