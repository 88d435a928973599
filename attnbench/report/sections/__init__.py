"""What a report says: the answer, a section for each question, and the words of all."""
