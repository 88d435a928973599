"""What may be said of scores: statistics over seeds, and who is separated from whom."""
